// What the page shows: messages, tokens, the list of conversations. Called by app.js.

import { renderMarkdown } from "/web/markdown.js";

/** One message's element; `shade` shows tokens by where they came from instead of markdown. */
export function messageElement(message, shade) {
  const element = document.createElement("article");
  fillMessage(element, message, shade);
  return element;
}

/** (Re)draws a message: { role, content, reasoning, tokens, error }. */
export function fillMessage(element, message, shade) {
  element.className = `message ${message.error ? "error" : message.role}`;
  element.setAttribute("aria-label", message.role === "user" ? "You" : "Answer");
  if (message.role === "user" || message.error) {
    element.textContent = message.error ?? message.content;
    return;
  }
  const parts = [];
  if (shade && message.tokens?.length) {
    parts.push(tokensElement(message.tokens));
  } else {
    if (message.reasoning) parts.push(reasoningElement(message.reasoning, element.querySelector("details")?.open));
    parts.push(renderMarkdown(message.content ?? ""));
  }
  element.replaceChildren(...parts);
}

function tokensElement(tokens) {
  const all = document.createElement("div");
  all.className = "tokens";
  for (const token of tokens) {
    const span = document.createElement("span");
    span.className = `token ${token.drafted ? "drafted" : "sampled"}`;
    span.title = token.drafted ? "drafted and accepted" : "sampled by the model";
    span.textContent = token.text;
    all.append(span);
  }
  return all;
}

function reasoningElement(text, open) {
  const details = document.createElement("details");
  details.open = open ?? false;
  const summary = document.createElement("summary");
  summary.textContent = "Reasoning";
  const body = document.createElement("div");
  body.append(renderMarkdown(text));
  details.append(summary, body);
  return details;
}

/** The list of conversations. */
export function drawList(list, talks, currentId, { open, remove }) {
  list.replaceChildren(
    ...talks.map((talk) => {
      const item = document.createElement("li");
      if (talk.id === currentId) item.setAttribute("aria-current", "true");
      item.append(
        button(talk.title || "New conversation", () => open(talk.id)),
        button("✕", () => remove(talk.id), `Delete ${talk.title || "conversation"}`),
      );
      return item;
    }),
  );
}

function button(text, action, label) {
  const made = document.createElement("button");
  made.type = "button";
  made.textContent = text;
  if (label) made.setAttribute("aria-label", label);
  made.addEventListener("click", action);
  return made;
}

/** One line about an answer, from the server's timings. */
export function statusText(timings) {
  if (!timings || !timings.predicted_n) return "";
  const parts = [`${timings.predicted_n} tokens`, `${timings.predicted_per_second.toFixed(1)} tokens/s`];
  if (timings.acceptance_length) {
    parts.push(`acceptance length ${timings.acceptance_length.toFixed(2)}`);
    parts.push(`${timings.draft_n_accepted} of ${timings.draft_n} drafted tokens accepted`);
  }
  return parts.join(" · ");
}
