// The queue by level, and a row for each live request.

import { byId, draw, keyed, make, mark, say, wide } from "./parts.js";
import { count, known, list, number, policyWords, reason, share, short, time } from "./words.js";

const SHOWN = 40; // rows; the squares of the queue show more
const GONE_MS = 2500; // so long a row stays after its request has ended
const COLUMN = 10; // px of a round
const CELLS = 36; // px: the height of the longest draft and the model's own token
const ROUNDS = 24;
const still = matchMedia("(prefers-reduced-motion: reduce)");

const rows = new Map();
const levels = new Map();
const gone = new Map(); // rows of requests that have ended, by id: until when, and the last that was known
let last = new Map();
export const own = new Set(); // ids of requests that this page sent

export function showQueue(frame) {
  const live = frame.waiting + frame.running + frame.paused;
  const order = `Order: ${policyWords(frame.policy)} (${frame.policy}).`;
  say(byId("queue-words"), live ? `${order} Each square is a request, and those to the left go first.` : order);
  const numbers = frame.levels.map((length, i) => ({ level: i + 1, length }));
  while (numbers.length > 1 && !numbers[numbers.length - 1].length) numbers.pop();
  for (const one of numbers) {
    one.members = frame.requests.filter((request) => request.level === one.level).sort((a, b) => a.position - b.position);
  }
  keyed(byId("levels"), levels, numbers, (one) => one.level, makeLevel, updateLevel);
}

function makeLevel(one) {
  const name = make("span", { class: "level-name" }, `Level ${one.level}`);
  const squares = make("span", { class: "squares", "aria-hidden": "true" });
  const text = make("span", { class: "level-text muted" });
  return { node: make("div", { class: "level" }, name, squares, text), squares, text, nodes: new Map() };
}

function updateLevel(level, one) {
  keyed(level.squares, level.nodes, one.members, (request) => request.id, () => ({ node: make("i") }), (square, request) => {
    mark(square.node, "class", `square ${request.state}${own.has(request.id) ? " own-request" : ""}`);
    mark(square.node, "title", `${short(request.id)}: ${request.state}`);
  });
  const states = ["running", "paused", "waiting"].map((state) => [state, one.members.filter((each) => each.state === state).length]);
  const told = states.filter(([, n]) => n).map(([state, n]) => `${n} ${state}`);
  const hidden = one.length - one.members.length;
  if (hidden > 0) told.push(`${hidden} more`);
  say(level.text, told.length ? told.join(", ") : "empty");
}

export function showRequests(frame) {
  const now = performance.now();
  const order = { running: 0, paused: 1, waiting: 2 };
  const shown = [...frame.requests].sort((a, b) => order[a.state] - order[b.state] || a.position - b.position).slice(0, SHOWN);
  const ids = new Set(frame.requests.map((one) => one.id));
  const whole = frame.requests.length >= frame.waiting + frame.running + frame.paused;
  for (const [id, before] of last) {
    if (whole && !ids.has(id) && rows.has(id)) gone.set(id, { until: now + GONE_MS, request: { ...before, state: "ended" } });
  }
  for (const [id, one] of gone) if (one.until < now || ids.has(id)) gone.delete(id);
  last = new Map(frame.requests.map((one) => [one.id, one]));
  const running = shown.filter((one) => one.state === "running");
  const items = [...running, ...[...gone.values()].map((one) => one.request), ...shown.slice(running.length)];
  const before = still.matches ? new Map() : places();
  keyed(byId("rows"), rows, items, (one) => one.id, makeRow, (row, one) => updateRow(row, one, frame));
  glide(before);
  byId("empty").hidden = items.length > 0;
  const more = frame.waiting + frame.running + frame.paused - shown.length;
  byId("more").hidden = more <= 0;
  if (more > 0) say(byId("more"), `${count(more, "more request")} behind these.`);
}

// Rows that changed places slide there.
const places = () => new Map([...rows].map(([id, row]) => [id, row.node.offsetTop]));

function glide(before) {
  for (const [id, row] of rows) {
    const moved = before.has(id) ? before.get(id) - row.node.offsetTop : 0;
    if (moved) row.node.animate([{ transform: `translateY(${moved}px)` }, { transform: "none" }], { duration: 220, easing: "ease-out" });
  }
}

function makeRow(request) {
  const chip = make("span", { class: "chip" });
  const tags = make("span", { class: "tags muted" });
  const id = make("code", { title: request.id }, short(request.id));
  const cells = draw("svg", { class: "rounds", width: ROUNDS * COLUMN, height: CELLS + 2, role: "img" });
  const ownPart = make("span", { class: "part own" });
  const guessed = make("span", { class: "part accepted" });
  const track = make("div", { class: "track", role: "progressbar", "aria-valuemin": "0" }, ownPart, guessed);
  const tokens = make("span", { class: "tokens" });
  const [next, why] = [make("p", { class: "next" }), make("p", { class: "why muted" })];
  const head = make("div", { class: "who" }, chip, id, tags);
  const bar = make("div", { class: "bar" }, cells, make("div", { class: "progress" }, track, tokens));
  return { node: make("li", { class: "request" }, head, bar, make("div", { class: "told" }, next, why)), chip, tags, cells, track, ownPart, guessed, tokens, next, why, drawn: "" };
}

function updateRow(row, one, frame) {
  mark(row.node, "class", `request ${one.state}${own.has(one.id) ? " own-request" : ""}`);
  say(row.chip, one.state);
  const tags = [];
  if (own.has(one.id)) tags.push("yours");
  if (one.priority !== "default") tags.push(one.priority);
  if (one.tenant && one.tenant !== "default") tags.push(one.tenant);
  if (frame.levels.length > 1) tags.push(`level ${one.level}`);
  say(row.tags, tags.join(" · "));
  const expected = Math.max(one.predicted, one.output, 1);
  const ended = one.state === "ended";
  const whole = ended ? Math.max(one.output, 1) : expected;
  const byModel = Math.min(one.rounds, one.output);
  wide(row.ownPart, byModel / whole);
  wide(row.guessed, (one.output - byModel) / whole);
  mark(row.track, "aria-valuenow", one.output);
  mark(row.track, "aria-valuemax", whole);
  mark(row.track, "aria-label", `tokens written by request ${short(one.id)}`);
  say(row.tokens, ended ? (one.output ? `about ${count(one.output, "token")}` : "") : `${number(one.output)} of about ${number(expected)} tokens`);
  drawRounds(row, one);
  say(row.next, outlook(one));
  say(row.why, because(one, frame.policy));
}

function drawRounds(row, one) {
  const drawn = JSON.stringify(one.recent) + one.rounds;
  if (row.drawn === drawn) return;
  row.drawn = drawn;
  const tall = Math.max(5, ...one.recent.map(([, drafted]) => drafted + 1));
  const step = CELLS / tall;
  const columns = one.recent.map(([tokens, drafted, accepted], i) => {
    const cells = [];
    for (let cell = 0; cell <= drafted; cell++) {
      if (cell === 0 && !tokens) continue;
      const kind = cell === 0 ? "own" : cell <= accepted ? "accepted" : "rejected";
      const hollow = kind === "rejected" ? 0.5 : 0;
      const [x, y] = [i * COLUMN + hollow, CELLS - (cell + 1) * step + hollow];
      cells.push(draw("rect", { class: kind, x, y: y.toFixed(1), width: COLUMN - 2 - 2 * hollow, height: Math.max(1, step - 1.5 - 2 * hollow).toFixed(1), rx: 1 }));
    }
    return draw("g", {}, ...cells);
  });
  row.cells.replaceChildren(...columns);
  row.cells.classList.toggle("none", !columns.length);
  mark(row.cells, "aria-label", one.rounds ? `${count(one.rounds, "round")}, ${share(one.acceptance)} of its guesses accepted` : "no round yet");
}

// What happens to it next, and why it stands where it stands.
function outlook(one) {
  const left = known(one.ends_in_s) && one.ends_in_s > 0 ? `done in about ${time(one.ends_in_s)}` : "";
  if (one.state === "ended") return `Ended, ${time(one.age_s)} after it came`; // finished or cancelled: no frame says
  if (one.state === "running") return left ? upper(left) : "Running";
  if (one.state === "paused") return left ? `Goes on later; ${left}` : "Goes on later";
  const starts = known(one.starts_in_s) && one.starts_in_s > 0 ? `starts in about ${time(one.starts_in_s)}` : "";
  if (one.reason === "no_worker") return one.output ? "Goes on with the next worker" : "Starts with the next worker";
  if (!one.position) return starts ? upper(starts) : "Starts now";
  const ahead = one.position === 1 ? "One goes first" : `${number(one.position)} go first`;
  return starts ? `${ahead}; ${starts}` : ahead;
}

function because(one, policy) {
  const said = [];
  if (one.state === "ended") return "";
  if (one.state === "waiting" && !one.output) said.push(`Waited ${time(one.queued_s)}.`);
  if (one.state === "running") said.push(`On ${one.worker || "a worker"}.`);
  const why = one.reason ? reason(one.reason, policy) : "";
  const them = why.startsWith("they") ? why : "";
  if (one.passed_by.length) said.push(`Passed by ${list(one.passed_by.map(short))}${why ? `: ${why}` : ""}.`);
  else if (them) said.push(`Others run: ${them}.`);
  else if (why) said.push(`${upper(why)}.`);
  if (one.pauses) said.push(`Paused ${one.pauses === 1 ? "once" : `${one.pauses} times`}.`);
  return said.join(" ");
}

const upper = (text) => text.charAt(0).toUpperCase() + text.slice(1);
