// Conversations and settings, kept in this browser only. Called by app.js.

const TALKS = "dspine.conversations";
const SETTINGS = "dspine.settings";
const MAX_TALKS = 100;

function read(name, fallback) {
  try {
    return JSON.parse(localStorage.getItem(name)) ?? fallback;
  } catch {
    return fallback;
  }
}

/** All conversations, newest first: { id, title, messages }. */
export function loadTalks() {
  const talks = read(TALKS, []);
  return Array.isArray(talks) ? talks.filter((talk) => Array.isArray(talk?.messages)) : [];
}

/** Keeps them; the oldest go when the browser has no more room. */
export function saveTalks(talks) {
  for (let n = Math.min(talks.length, MAX_TALKS); n >= 0; n = n > 1 ? Math.floor(n / 2) : n - 1) {
    try {
      localStorage.setItem(TALKS, JSON.stringify(talks.slice(0, n)));
      return;
    } catch {
      // no room: try with fewer
    }
  }
}

/** { system, key, shade, sampling: { name: number } } */
export function loadSettings() {
  return { system: "", key: "", shade: false, sampling: {}, ...read(SETTINGS, {}) };
}

export function saveSettings(settings) {
  try {
    localStorage.setItem(SETTINGS, JSON.stringify(settings));
  } catch {
    // they last as long as the page
  }
}
