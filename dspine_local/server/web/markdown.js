// Markdown as DOM nodes, never as HTML: text of a model can bring no markup of its own. Called by view.js.

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)/;
const INLINE = /(`+)(.+?)\1|\*\*(.+?)\*\*|\*([^*\s](?:[^*]*[^*\s])?)\*|\[([^\]]+)\]\(([^)\s]+)\)/s;

/** The nodes of a text. */
export function renderMarkdown(text) {
  const out = document.createDocumentFragment();
  const lines = text.split("\n");
  let at = 0;
  while (at < lines.length) {
    const fence = lines[at].match(FENCE);
    const heading = lines[at].match(/^(#{1,6})\s+(.*)/);
    if (fence) {
      at = code(out, lines, at + 1, fence[1]);
    } else if (heading) {
      out.append(inline(element(`h${Math.min(6, heading[1].length + 1)}`), heading[2]));
      at += 1;
    } else if (/^\s*([-*+]|\d+[.)])\s+/.test(lines[at])) {
      at = list(out, lines, at);
    } else if (/^>\s?/.test(lines[at])) {
      at = block(out, lines, at, /^>\s?/, "blockquote");
    } else if (lines[at].trim() === "") {
      at += 1;
    } else {
      at = paragraph(out, lines, at);
    }
  }
  return out;
}

function element(name) {
  return document.createElement(name);
}

function code(out, lines, at, fence) {
  const begin = at;
  while (at < lines.length && !lines[at].trim().startsWith(fence)) at += 1;
  const pre = element("pre");
  pre.append(element("code"));
  pre.firstChild.textContent = lines.slice(begin, at).join("\n");
  out.append(pre);
  return at + 1;
}

function list(out, lines, at) {
  const ordered = /^\s*\d/.test(lines[at]);
  const items = element(ordered ? "ol" : "ul");
  if (ordered) items.start = Number.parseInt(lines[at], 10);
  const mark = ordered ? /^\s*\d+[.)]\s+/ : /^\s*[-*+]\s+/;
  while (at < lines.length && mark.test(lines[at])) {
    let text = lines[at].replace(mark, "");
    at += 1;
    while (at < lines.length && /^\s+\S/.test(lines[at]) && !/^\s*([-*+]|\d+[.)])\s+/.test(lines[at])) {
      text += `\n${lines[at].trim()}`;
      at += 1;
    }
    items.append(inline(element("li"), text));
  }
  out.append(items);
  return at;
}

function block(out, lines, at, mark, name) {
  const texts = [];
  while (at < lines.length && mark.test(lines[at])) texts.push(lines[at++].replace(mark, ""));
  out.append(inline(element(name), texts.join("\n")));
  return at;
}

function paragraph(out, lines, at) {
  const texts = [];
  while (at < lines.length && lines[at].trim() !== "" && !FENCE.test(lines[at])) texts.push(lines[at++]);
  out.append(inline(element("p"), texts.join("\n")));
  return at;
}

function inline(parent, text) {
  let rest = text;
  for (let found = rest.match(INLINE); found; found = rest.match(INLINE)) {
    parent.append(rest.slice(0, found.index));
    parent.append(span(found));
    rest = rest.slice(found.index + found[0].length);
  }
  parent.append(rest);
  return parent;
}

function span([whole, , codeText, strong, em, label, href]) {
  if (codeText !== undefined) {
    const node = element("code");
    node.textContent = codeText;
    return node;
  }
  if (strong !== undefined) return inline(element("strong"), strong);
  if (em !== undefined) return inline(element("em"), em);
  if (!/^https?:\/\//i.test(href)) return document.createTextNode(whole);
  const link = element("a");
  link.href = href;
  link.rel = "noopener noreferrer nofollow";
  link.target = "_blank";
  link.textContent = label;
  return link;
}
