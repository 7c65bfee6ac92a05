// The page: who may see it, its feed, its figures and its workers.

import { ask, byId, keyed, make, mark, meter, say, Trend } from "./parts.js";
import { keepComparing } from "./policies.js";
import { forget, watchBox } from "./prompt.js";
import { showQueue, showRequests } from "./requests.js";
import { known, list, number, share, short, time } from "./words.js";

const SECOND = 1000;
const SILENT = 20; // seconds
const workers = new Map();
const figures = {};
let feed = null;
let latest = null;
let comparing = false;
let heard = 0; // when the last frame came
let coming = 0; // the timer of the next visit
let due = false; // there is to be one: at once where the page was hidden

function figure(name, label, hint, most) {
  const value = make("dd", { class: "value" }, "–");
  const trend = most === undefined ? null : new Trend(most);
  const node = make("div", { class: "figure" }, make("dt", { title: hint }, label), value);
  if (trend) node.append(make("dd", { class: "chart" }, trend.node));
  const note = make("dd", { class: "note muted" });
  node.append(note);
  byId("figures").append(node);
  figures[name] = { value, trend, note };
}

function showFigures(frame) {
  const { rates } = frame;
  const set = (name, value, note) => (say(figures[name].value, value), say(figures[name].note, note));
  set("tokens", number(rates.output_tokens), "tokens a second, all requests together");
  set("live", number(frame.running + frame.paused + frame.waiting), `${number(frame.running)} running, ${number(frame.paused)} paused, ${number(frame.waiting)} waiting`);
  set("guesses", share(rates.acceptance), "of the guessed tokens were right");
  set("done", known(rates.finished) ? number(60 * rates.finished) : "–", `answers a minute; ${number(frame.finished)} in all${frame.refused ? `, ${number(frame.refused)} refused` : ""}`);
  set("pauses", known(rates.preemptions) ? number(rates.preemptions, 1) : "–", "pauses a second, so that others go first");
  set("decision", frame.decision_s ? time(frame.decision_s) : "–", "for the scheduler to decide, median");
}

function everySecond() {
  // Where the scheduler answers slowly an open feed is silent for long: see feed.py.
  const patience = feed?.readyState === EventSource.OPEN ? SILENT : 4;
  const silent = feed && !document.hidden ? performance.now() - heard : 0;
  if (silent > patience * SECOND) connection("away", "connecting again");
  // A connection that a proxy or a sleeping machine has forgotten stays as it is, and silent.
  if (silent > SILENT * SECOND && feed.readyState !== EventSource.CLOSED) follow();
  if (latest && feed?.readyState === EventSource.OPEN) {
    figures.tokens.trend.add(latest.rates.output_tokens);
    figures.live.trend.add(latest.running + latest.paused + latest.waiting);
    figures.guesses.trend.add(latest.rates.acceptance);
  }
}

function showWorkers(frame) {
  keyed(byId("workers"), workers, frame.workers, (one) => one.id, makeWorker, (worker, one) => updateWorker(worker, one, frame));
  if (frame.workers.length) return;
  const loads = frame.loading.length === 1 ? "loads" : "load";
  const next = frame.loading.length ? `${list(frame.loading)} ${loads} the model.` : "laps-sd up starts one.";
  say(byId("workers"), `No worker is attached, so nothing can run. ${next}`);
}

function makeWorker(one) {
  if (!workers.size) byId("workers").replaceChildren();
  const slots = make("ul", { class: "slots", "aria-label": `Slots of ${one.id}` });
  const speed = make("span", { class: "speed" });
  const meters = { kv: meter("memory for texts"), guesses: meter("guesses right"), idle: meter("idle for want of orders") };
  const node = make("article", { class: "worker" }, make("h3", {}, one.id, speed), slots, ...Object.values(meters).map((each) => each.node));
  return { node, slots, speed, meters, nodes: new Map() };
}

function updateWorker(worker, one, frame) {
  const here = frame.requests.filter((request) => request.state === "running" && request.worker === one.id);
  // Some of those that run are not among the requests listed.
  const boxes = Array.from({ length: one.slots }, (_, i) => ({ key: i, id: here[i]?.id, busy: i < one.running })).slice(0, 32);
  keyed(worker.slots, worker.nodes, boxes, (box) => box.key, () => ({ node: make("li") }), (box, slot) => {
    mark(box.node, "class", slot.id || slot.busy ? "slot busy" : "slot");
    say(box.node, slot.id ? short(slot.id) : slot.busy ? "busy" : "free");
  });
  say(worker.speed, `${one.draining ? "draining, " : ""}${number(one.tokens_per_s)} tokens/s`);
  const [drafted, accepted] = here.flatMap((request) => request.recent).reduce(([d, a], [, drafts, right]) => [d + drafts, a + right], [0, 0]);
  worker.meters.kv.set(one.kv, share(one.kv));
  worker.meters.guesses.set(drafted ? accepted / drafted : 0, drafted ? share(accepted / drafted) : "–");
  worker.meters.idle.set(one.idle, `${number(100 * one.idle, 1)} %`);
}

function connection(state, text) {
  mark(byId("connection"), "class", state);
  say(byId("connection").querySelector(".text"), text);
}

function problem(text) {
  byId("problem").hidden = !text;
  say(byId("problem"), text);
}

function show(frame) {
  if (frame.problem) {
    connection("away", "no figures");
    problem(`The gateway has no figures: ${frame.problem}.`);
    return;
  }
  latest = frame;
  problem("");
  connection("up", "live");
  const learned = frame.predictor === "warm" ? `lengths predicted from ${number(frame.learned_from)} answers` : "still learning how long answers are";
  say(byId("about"), [frame.model || "no model yet", `order ${frame.policy}`, learned].join(" · "));
  showFigures(frame);
  showQueue(frame);
  showRequests(frame);
  showWorkers(frame);
}

function follow() {
  feed?.close();
  due = document.hidden;
  if (due) return;
  feed = new EventSource("page/feed");
  heard = performance.now();
  feed.onmessage = (event) => {
    heard = performance.now();
    show(JSON.parse(event.data));
  };
  feed.onerror = (event) => {
    if (event.target === feed && feed.readyState === EventSource.CLOSED) again(2); // refused: perhaps a key is needed
  };
}

function again(seconds) {
  clearTimeout(coming);
  due = true;
  coming = setTimeout(enter, seconds * SECOND);
}

// Whether this browser may see the page; if it may, the feed begins.
async function enter() {
  clearTimeout(coming);
  due = false;
  let told;
  try {
    told = await (await ask("page/session")).json();
  } catch {
    connection("away", "the gateway does not answer");
    again(2);
    return;
  }
  byId("main").hidden = !told.open;
  byId("login").hidden = told.open || !told.keyed;
  byId("logout").hidden = !(told.open && told.keyed);
  if (told.open) {
    follow();
    if (!comparing) keepComparing();
    comparing = true;
  } else {
    feed?.close();
    feed = null;
    connection("away", "locked");
    say(byId("about"), "");
    if (told.keyed) return byId("key").focus();
    problem(`${told.problem}.`);
    again(10);
  }
}

// A page that nobody sees asks for nothing.
function look() {
  if (document.hidden) {
    clearTimeout(coming);
    feed?.close();
  } else if (feed || due) enter();
}

async function login(event) {
  event.preventDefault();
  const key = byId("key").value.trim().replace(/^Bearer\s+/i, "");
  byId("key").value = "";
  try {
    await ask("page/login", { key });
    problem("");
    await enter();
  } catch (error) {
    problem(`Not let in: ${error.message}.`);
    byId("key").focus();
  }
}

async function logout() {
  feed?.close();
  feed = null;
  forget();
  await ask("page/logout", {}).catch(() => {});
  await enter();
}

async function copy() {
  await navigator.clipboard?.writeText(byId("command").textContent).catch(() => {});
  getSelection().selectAllChildren(byId("command"));
  say(byId("copy"), "Copied");
  setTimeout(() => say(byId("copy"), "Copy"), 2 * SECOND);
}

figure("tokens", "Speed", "output tokens of all requests, over the last seconds", 1);
figure("live", "Requests", "requests that wait or run now", 1);
figure("guesses", "Guesses right", "drafted tokens that the model accepted", 1);
figure("done", "Finished", "requests that ended with an answer");
figure("pauses", "Pauses", "running requests that were paused for others");
figure("decision", "Decision", "from a worker's report to its next command");
byId("login").addEventListener("submit", login);
byId("logout").addEventListener("click", logout);
byId("copy").addEventListener("click", copy);
watchBox();
document.addEventListener("visibilitychange", look);
setInterval(everySecond, SECOND);
enter();
