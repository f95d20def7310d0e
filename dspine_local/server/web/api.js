// The server, from the page's side. Called by app.js.

/** Objects of a chat's stream. Ends when the server has finished; throws an Error with its message. */
export async function* streamChat(body, { signal, key }) {
  const response = await fetch("/v1/chat/completions", {
    method: "POST",
    headers: headers(key),
    body: JSON.stringify({
      ...body,
      stream: true,
      return_provenance: true,
      timings_per_token: true,
    }),
    signal,
  });
  if (!response.ok) throw new Error(await messageOf(response));
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (held + value).split("\n");
    held = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ") || line === "data: [DONE]") continue;
      const event = JSON.parse(line.slice("data: ".length));
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
}

/** The model's name. */
export async function modelName(key) {
  const response = await fetch("/v1/models", { headers: headers(key) });
  if (!response.ok) throw new Error(await messageOf(response));
  return (await response.json()).data[0].id;
}

function headers(key) {
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

async function messageOf(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the server answered ${response.status}`;
  }
}
