// The policies side by side on what ended in the last minutes, by the simulator.

import { ask, byId, make, say, wide } from "./parts.js";
import { count, number, policyWords, time } from "./words.js";

const EVERY_MS = 20000;
let timer = 0;

export function keepComparing() {
  byId("compare").addEventListener("click", () => compare());
  compare();
}

async function compare() {
  clearTimeout(timer);
  let soon = EVERY_MS;
  if (!document.hidden && !byId("main").hidden) {
    try {
      const told = await (await ask("page/policies")).json();
      show(told);
      if (told.computing || (!told.policies.length && told.ended < told.least)) soon = 2000;
    } catch (error) {
      say(byId("policies-words"), `No comparison: ${error.message}.`);
    }
  }
  timer = setTimeout(compare, soon);
}

function show(told) {
  byId("compare").disabled = told.computing;
  say(byId("compare"), told.computing ? "The simulator runs …" : "Compare again");
  if (!told.policies.length) {
    const few = `Once ${told.least} requests have ended (${told.ended} so far), the simulator serves them anew under each order and shows the mean time to a whole answer.`;
    say(byId("policies-words"), told.problem ? `The last comparison failed: ${told.problem}.` : few);
    byId("policies").replaceChildren();
    return;
  }
  const failed = told.problem ? ` The newest comparison failed: ${told.problem}.` : "";
  const came = told.window_s < 0.1 ? "which came all at once" : `which came within ${time(told.window_s)}`;
  say(byId("policies-words"), `The last ${count(told.requests, "request")}, ${came}, served anew by the simulator under each order: mean time to a whole answer. Really served it took ${time(told.measured_s)}.${failed}`);
  const first = told.policies.find((one) => one.policy === "fcfs") ?? told.policies[0];
  const most = Math.max(...told.policies.map((one) => one.mean_s), 0.001);
  const rows = told.policies.map((one) => row(one, first, most, one.policy === told.running));
  const head = make("tr", {}, ...["order", "mean", "slowest 1 %", "pauses"].map((title) => make("th", { scope: "col" }, title)));
  byId("policies").replaceChildren(make("table", { class: "policies" }, make("thead", {}, head), make("tbody", {}, ...rows)));
}

function row(one, first, most, running) {
  const fill = make("span", { class: `fill${running ? " running" : ""}` });
  wide(fill, one.mean_s / most);
  const gain = first.mean_s ? Math.round(100 * (one.mean_s / first.mean_s - 1)) : 0;
  const against = one === first || !gain ? "" : ` ${gain > 0 ? "+" : "−"}${Math.abs(gain)} %`;
  const name = make("th", { scope: "row" }, make("span", { class: "policy-words" }, policyWords(one.policy)), " ", make("code", {}, one.policy));
  if (running) name.append(" ", make("span", { class: "chip running" }, "serves now"));
  const mean = make("td", { class: "mean" }, make("span", { class: "track", "aria-hidden": "true" }, fill), make("span", {}, time(one.mean_s)), make("small", {}, against));
  return make("tr", { class: running ? "is-running" : "" }, name, mean, make("td", {}, time(one.p99_s)), make("td", {}, number(one.pauses, 1)));
}
