// The chat page: ties the server (api.js), what is kept (store.js) and what is shown (view.js) together.

import { modelName, streamChat } from "/web/api.js";
import { loadSettings, loadTalks, saveSettings, saveTalks } from "/web/store.js";
import { drawList, fillMessage, messageElement, statusText } from "/web/view.js";

const SAMPLING = [
  ["temperature", "Temperature (0 is greedy)", 0.05],
  ["top_k", "Top k (0 is all)", 1],
  ["top_p", "Top p (1 is all)", 0.01],
  ["min_p", "Min p (0 is off)", 0.01],
  ["repeat_penalty", "Repeat penalty (1 is off)", 0.01],
  ["max_tokens", "Tokens at most", 1],
  ["seed", "Seed", 1],
];

const $ = (id) => document.getElementById(id);
const settings = loadSettings();
let talks = loadTalks();
let talk = talks[0] ?? newTalk();
const elements = new WeakMap(); // of the messages that are shown
let running = null; // AbortController of the answer that is coming

function newTalk() {
  // randomUUID needs a secure context; a server in the local network is none.
  return { id: `${Date.now()}-${Math.random()}`, title: "", messages: [] };
}

function draw() {
  $("log").replaceChildren(
    ...talk.messages.map((message) => {
      elements.set(message, messageElement(message, settings.shade));
      return elements.get(message);
    }),
  );
  $("legend").hidden = !settings.shade;
  $("log").scrollTop = $("log").scrollHeight;
  drawList($("list"), talks, talk.id, { open: openTalk, remove: removeTalk });
}

function openTalk(id) {
  running?.abort();
  talk = talks.find((one) => one.id === id) ?? newTalk();
  $("status").textContent = "";
  showMenu(false);
  draw();
  $("prompt").focus();
}

function removeTalk(id) {
  talks = talks.filter((one) => one.id !== id);
  saveTalks(talks);
  openTalk(talk.id === id ? talks[0]?.id : talk.id);
}

function keep(one) {
  talks = [one, ...talks.filter((other) => other.id !== one.id)];
  saveTalks(talks);
}

async function ask(text) {
  const own = talk; // the user may open another one meanwhile
  own.title ||= text.slice(0, 60);
  own.messages.push({ role: "user", content: text });
  const asked = own.messages.filter((message) => !message.error).map(({ role, content }) => ({ role, content }));
  const answer = { role: "assistant", content: "", reasoning: "", tokens: [] };
  own.messages.push(answer);
  keep(own);
  draw();
  const controller = new AbortController();
  setRunning(controller);
  const messages = settings.system ? [{ role: "system", content: settings.system }, ...asked] : asked;
  try {
    for await (const event of streamChat(
      { messages, ...settings.sampling },
      { signal: controller.signal, key: settings.key },
    )) {
      add(answer, event);
      show(own, answer, event.timings);
    }
  } catch (error) {
    if (!controller.signal.aborted) own.messages.push({ role: "assistant", error: error.message });
  }
  if (!answer.content && !answer.reasoning) own.messages = own.messages.filter((message) => message !== answer);
  keep(own);
  if (running === controller) setRunning(null);
  if (own === talk) draw();
}

function add(answer, event) {
  for (const { delta } of event.choices) {
    answer.content += delta.content ?? "";
    answer.reasoning += delta.reasoning_content ?? "";
  }
  answer.tokens.push(...(event.provenance ?? []));
}

let pending = 0;
function show(own, answer, timings) {
  if (own === talk && timings) $("status").textContent = statusText(timings);
  if (pending || own !== talk) return;
  pending = requestAnimationFrame(() => {
    pending = 0;
    const log = $("log");
    const follows = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
    fillMessage(elements.get(answer), answer, settings.shade);
    if (follows) log.scrollTop = log.scrollHeight;
  });
}

function setRunning(controller) {
  running = controller;
  $("send").hidden = controller !== null;
  $("stop").hidden = controller === null;
  $("log").setAttribute("aria-busy", String(controller !== null));
}

function showMenu(open) {
  document.body.classList.toggle("menu-open", open);
  $("menu").setAttribute("aria-expanded", String(open));
}

function buildSettings() {
  for (const [name, label, step] of SAMPLING) {
    const row = document.createElement("label");
    const input = document.createElement("input");
    Object.assign(input, { id: `sampling-${name}`, type: "number", step, placeholder: "the server's" });
    input.value = settings.sampling[name] ?? "";
    input.addEventListener("change", () => {
      if (input.value === "") delete settings.sampling[name];
      else settings.sampling[name] = input.valueAsNumber;
      saveSettings(settings);
    });
    row.append(label, input);
    $("sampling").append(row);
  }
  for (const id of ["system", "key"]) {
    $(id).value = settings[id];
    $(id).addEventListener("change", () => {
      settings[id] = $(id).value;
      saveSettings(settings);
      if (id === "key") greet();
    });
  }
}

async function greet() {
  try {
    $("model").textContent = await modelName(settings.key);
  } catch (error) {
    $("status").textContent = error.message;
    if (error.message === "Loading model") setTimeout(greet, 1000);
  }
}

$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("prompt").value.trim();
  if (!text || running) return;
  $("prompt").value = "";
  ask(text);
});
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("form").requestSubmit();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !$("settings").open) running?.abort();
});
$("stop").addEventListener("click", () => running?.abort());
$("new").addEventListener("click", () => openTalk(null));
$("menu").addEventListener("click", () => showMenu(!document.body.classList.contains("menu-open")));
$("open-settings").addEventListener("click", () => $("settings").showModal());
$("shade").checked = settings.shade;
$("shade").addEventListener("change", () => {
  settings.shade = $("shade").checked;
  saveSettings(settings);
  draw();
});

buildSettings();
draw();
greet();
