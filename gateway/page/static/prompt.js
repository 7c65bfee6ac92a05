// The box that sends a prompt and shows its answer as it comes.

import { ask, byId, make, say } from "./parts.js";
import { own } from "./requests.js";
import { count, number, share, short, time } from "./words.js";

let running = null;

export function watchBox() {
  byId("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  byId("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) byId("ask").requestSubmit();
  });
  byId("stop").addEventListener("click", () => running?.abort());
  byId("samples").addEventListener("click", sendSamples);
}

// The next person at this browser reads nothing of this one's.
export function forget() {
  running?.abort();
  own.clear();
  byId("prompt").value = "";
  byId("answer").hidden = true;
  byId("answer-text").replaceChildren();
}

async function sendSamples() {
  byId("samples").disabled = true;
  try {
    const told = await (await ask("page/samples", {})).json();
    sayOfSamples(`${count(told.sent, "sample prompt")} sent: see the requests, and what is refused among the figures.`);
  } catch (error) {
    sayOfSamples(`Not sent: ${error.message}.`);
  }
  byId("samples").disabled = false;
}

function sayOfSamples(words) {
  if (running) return; // an answer is being shown there
  byId("answer").hidden = false;
  byId("answer-text").replaceChildren();
  say(byId("answer-state"), words);
}

async function send() {
  if (running) return;
  const prompt = byId("prompt").value.trim() || byId("prompt").placeholder;
  running = new AbortController();
  byId("send").disabled = true;
  byId("stop").hidden = byId("answer").hidden = false;
  byId("answer-text").replaceChildren();
  say(byId("answer-state"), "Sent …");
  try {
    await read((await ask("page/prompt", { prompt, max_tokens: Number(byId("tokens").value) }, running.signal)).body);
  } catch (error) {
    say(byId("answer-state"), error.name === "AbortError" ? "Stopped." : `No answer: ${error.message}.`);
  }
  running = null;
  byId("send").disabled = false;
  byId("stop").hidden = true;
}

async function read(body) {
  const state = { id: "", output: 0, began: performance.now(), ended: false };
  const decoder = new TextDecoder();
  const reader = body.getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    rest += decoder.decode(value ?? new Uint8Array(), { stream: !done });
    const lines = rest.split("\n");
    rest = lines.pop();
    for (const line of lines) take(JSON.parse(line), state);
    if (done) break;
  }
  if (!state.ended) throw new Error("the answer was broken off");
}

function take(told, state) {
  if (told.error) throw new Error(told.error.message);
  if (told.id) {
    state.id = told.id;
    own.add(told.id);
    say(byId("answer-state"), `Request ${short(told.id)}, ${count(told.prompt_tokens, "token")} to read.`);
    return;
  }
  if (told.text) byId("answer-text").append(piece(told));
  state.output += told.rounds.reduce((sum, [tokens]) => sum + tokens, 0);
  if (told.final) finish(told.final, state);
}

// The text of some rounds; what came of accepted guesses is tinted by how many there were.
function piece(told) {
  const accepted = told.rounds.reduce((sum, [, , one]) => sum + one, 0);
  return make("span", { class: accepted ? "guessed" : "plain" }, told.text);
}

function finish(final, state) {
  state.ended = true;
  const took = (performance.now() - state.began) / 1000;
  const ends = { stop: "", length: " It was cut at the bound you chose.", cancelled: " It was ended." };
  const guesses = final.drafted ? ` ${share(final.accepted / final.drafted)} of the guesses were right.` : "";
  const pauses = final.pauses ? ` Paused ${count(final.pauses, "time")}.` : "";
  say(byId("answer-state"), `${count(final.output, "token")} in ${time(took)}, ${number(final.output / took)} tokens/s; waited ${time(final.queued_s)}.${guesses}${pauses}${ends[final.reason] ?? ""}`);
}
