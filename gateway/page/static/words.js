// The words and numbers of the page. Nothing is drawn here.

const LIKELY = "are expected to be done sooner";
const LESS = "have had less time so far";
const CLAIMS = { gittins: LIKELY, "srpt-length": LIKELY, sjf: LIKELY, "laps-sd": LIKELY, oracle: LIKELY, las: LESS, mlfq: LESS, gsa: LESS };

// Who "they" are: the requests that run in its place.
const REASONS = {
  no_worker: () => "no worker is attached",
  suspect: () => "a worker died while it may have been running; it gets one to itself",
  turn: () => "it runs as soon as a slot and memory are free",
  arrival: () => "they came first",
  begun: () => "they have begun, and this order never pauses a request",
  priority: () => "they are more urgent, or of a class that is owed service",
  tenant: () => "they belong to somebody who got less than their share",
  overdue: () => "they were passed so often that they go first now",
  level: () => "they are on a higher level",
  perceptible: () => "it is known by now how long they will take",
  claim: (policy) => `they ${CLAIMS[policy] ?? "go first by this order"}`,
};

const POLICIES = {
  fcfs: "first come, first served",
  sjf: "shortest first, no pauses",
  "srpt-length": "shortest rest first",
  las: "least served first",
  mlfq: "queues by service",
  "laps-sd": "LAPS-SD, as published",
  gsa: "queues by length so far",
  gittins: "likeliest done soonest",
  oracle: "all lengths known before",
};

export const reason = (name, policy) => (REASONS[name] ?? (() => ""))(policy);
export const policyWords = (name) => POLICIES[name.split(":")[0]] ?? name;
export const known = (value) => value !== null && value !== undefined;

export function number(value, digits = 0) {
  return known(value) ? value.toLocaleString("en", { maximumFractionDigits: digits, minimumFractionDigits: digits }) : "–";
}

export const share = (value) => (known(value) ? `${Math.round(100 * value)} %` : "–");

export function time(seconds) {
  if (!known(seconds)) return "–";
  if (seconds < 0.0095) return `${number(1000 * seconds, 1)} ms`;
  if (seconds < 0.995) return `${number(1000 * seconds)} ms`;
  if (seconds < 99.5) return `${number(seconds, seconds < 9.95 ? 1 : 0)} s`;
  return `${number(seconds / 60)} min`;
}

// Both ends: the choices of one call differ in the last letters alone, and numbered ids there, too.
export const short = (id) => (id.length > 12 ? `${id.slice(0, 5)}…${id.slice(-6)}` : id);
export const count = (n, one, many = `${one}s`) => `${number(n)} ${n === 1 ? one : many}`;

export function list(names) {
  if (names.length < 2) return names.join("");
  return `${names.slice(0, -1).join(", ")} and ${names[names.length - 1]}`;
}
