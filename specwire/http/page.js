"use strict";
// Speaks the public API only: /v1/models, and /v1/completions with `return_fates`.

const $ = (id) => document.getElementById(id);
// Every moment of a generation belongs to one of them.
const STAGES = [
  "admission", "draft", "draft_queue", "draft_network", "verify", "verify_queue", "verify_network",
  "rule", "emit", "client_credit", "failover", "coordinator",
];
/** Sources of guesses that are no model. */
const METHODS = new Set(document.body.dataset.methods.split(" "));

let model = "";
let running = null; // AbortController of what runs now

// --- the API -------------------------------------------------------------------------------------

function headers() {
  const token = $("token").value;
  return { "content-type": "application/json", ...(token ? { authorization: `Bearer ${token}` } : {}) };
}

async function refusal(response) {
  const told = await response.json().catch(() => null);
  const message = told?.error?.message ?? `${response.status} ${response.statusText}`;
  return new Error(response.status === 401 ? `An access token is needed: ${message}` : message);
}

async function findModel() {
  const response = await fetch("v1/models", { headers: headers() });
  if (!response.ok) throw await refusal(response);
  model = (await response.json()).data[0].id;
  $("model").textContent = model;
}

/** The JSON of each server-sent event, until [DONE]. */
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Error("the connection ended before the answer did");
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
}

/** Rule gumbel, so that the seed alone fixes the text, with speculation and without. */
function request(settings, overrides) {
  const { prompt, max_tokens, temperature, seed } = settings;
  const asked = { model, prompt, max_tokens, temperature, seed, rule: "gumbel" };
  return { ...asked, stream: true, stream_options: { include_usage: true }, return_fates: true, ...overrides };
}

async function* generate(body, signal) {
  const init = { method: "POST", headers: headers(), body: JSON.stringify(body), signal };
  const response = await fetch("v1/completions", init);
  if (!response.ok) throw await refusal(response);
  yield* events(response);
}

// --- one lane: a text, its clock and its speed ------------------------------------------------------

class Lane {
  constructor(name) {
    this.root = $(`lane-${name}`);
    this.recordElement = $(`record-${name}`);
    this.find = (selector) => this.root.querySelector(selector);
  }

  reset(prompt, maxTokens) {
    this.ids = [];
    this.rounds = [];
    this.numWhole = 0;
    this.record = null;
    this.startedMs = this.endedMs = 0;
    this.find(".text").replaceChildren(element("span", { className: "given", textContent: prompt }));
    Object.assign(this.find("progress"), { max: maxTokens, value: 0 });
    this.recordElement.textContent = "";
    this.tick();
  }

  start() {
    this.startedMs = performance.now();
    const tick = () => {
      this.tick();
      if (!this.endedMs) requestAnimationFrame(tick);
    };
    tick();
  }

  /** What a chunk brought: its tokens, and the guesses that were refused before the last of them. */
  add({ tokens, rejected, tree }) {
    const text = this.find(".text");
    const atEnd = text.scrollHeight - text.scrollTop - text.clientHeight < 40;
    if (tree) this.rounds.push({ tree, spans: [], numEmitted: 0, own: null });
    const refused = rejected.map((token) => shown({ ...token, text: visible(token.text) }));
    refused.forEach((span) => this.assign(span, this.rounds.length - 1));
    const emitted = tokens.map((token) => this.emit(token));
    text.append(...emitted.slice(0, -1), ...refused, ...emitted.slice(-1));
    this.ids.push(...tokens.map((token) => token.id));
    this.find("progress").value = this.ids.length;
    if (atEnd) text.scrollTop = text.scrollHeight;
  }

  /** A round emits the path of its tree and a token of the target's own; some may come with a later chunk. */
  emit(token) {
    const span = shown(token);
    const round = this.assign(span, this.numWhole);
    if (round && ++round.numEmitted > round.tree.path.length) {
      round.own = token;
      this.numWhole += 1;
    }
    return span;
  }

  assign(span, index) {
    const round = this.rounds[index];
    round?.spans.push(span);
    span.dataset.round = index;
    return round;
  }

  end(record) {
    this.endedMs = performance.now();
    this.record = record;
    if (record) this.recordElement.textContent = JSON.stringify(record, null, 2);
    this.tick();
  }

  get seconds() {
    return this.startedMs ? ((this.endedMs || performance.now()) - this.startedMs) / 1e3 : 0;
  }

  get speed() {
    return this.seconds ? this.ids.length / this.seconds : 0;
  }

  tick() {
    this.find(".clock").textContent = `${this.seconds.toFixed(2)} s`;
    this.find(".speed").textContent = this.ids.length ? `${this.speed.toFixed(1)} tokens/s` : "– tokens/s";
  }
}

function element(name, properties = {}, children = []) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

function shown(token) {
  const title = `${token.fate}, ${token.source ? `a guess of ${token.source}` : "the target's own"}`;
  const span = element("span", { className: "token", textContent: token.text, title });
  mark(span, token.fate, token.source);
  if (token.fate === "rejected") span.classList.add("rejected");
  return span;
}

function mark(node, fate, source) {
  node.dataset.fate = fate;
  node.dataset.from = METHODS.has(source) ? "text" : source ? "model" : "target";
  return node;
}

function visible(text) {
  return text.replaceAll("\n", "⏎") || "∅";
}

// --- the live view -----------------------------------------------------------------------------------

const live = {
  reset() {
    for (const id of ["rounds", "mean-length", "rate", "prepared"]) $(id).textContent = "–";
    $("positions").replaceChildren(element("li", { className: "empty", textContent: "no guesses yet" }));
    $("stages").replaceChildren();
    $("stage-times").replaceChildren();
    $("sources").replaceChildren();
    $("strip").replaceChildren();
    trees.reset();
  },

  add({ rejected, tree, speculation, timing }) {
    this.count(speculation);
    this.sources(speculation);
    this.positions(speculation);
    this.stages(timing);
    if (!tree) return; // a coordinator that does not send it
    this.round(tree, rejected);
    trees.follow();
  },

  count(counts) {
    const drafts = counts.acceptance_histogram.reduce((sum, n) => sum + n, 0);
    $("rounds").textContent = counts.num_rounds;
    if (!drafts) return;
    $("mean-length").textContent = (1 + counts.num_accepted_tokens / drafts).toFixed(2);
    $("rate").textContent = percent(counts.num_accepted_tokens, counts.num_draft_tokens);
    $("prepared").textContent = percent(counts.num_prepared, drafts);
  },

  sources({ by_source: counts }) {
    const rows = counts.map(({ source, num_accepted_tokens: accepted, num_draft_tokens: drafted }) => {
      const name = mark(element("span", { className: "token", textContent: source }), "accepted", source);
      return element("li", {}, [name, ` ${accepted} of ${drafted}`]);
    });
    $("sources").replaceChildren(...rows);
  },

  positions({ drafted_per_position: drafted, accepted_per_position: accepted }) {
    if (!drafted.length) return;
    const columns = drafted.map((num, i) => {
      const bar = element("i");
      bar.style.height = `${(100 * accepted[i]) / num}%`;
      const column = element("div", { className: "column" }, [bar]);
      const share = element("span", { textContent: percent(accepted[i], num) });
      const name = element("small", { textContent: `#${i + 1}` });
      return element("li", { title: `${accepted[i]} of ${num}` }, [column, share, name]);
    });
    $("positions").replaceChildren(...columns);
  },

  stages(timing) {
    const parts = STAGES.map((name) => [name, timing[`${name}_ms`]]);
    $("stages").replaceChildren(
      ...parts.map(([name, ms]) => {
        const part = stageMark(name);
        part.style.width = `${(100 * ms) / timing.total_ms}%`;
        return part;
      }),
    );
    $("stage-times").replaceChildren(
      ...parts.map(([name, ms]) =>
        element("div", {}, [
          element("dt", {}, [stageMark(name), name.replace("_", " ")]),
          element("dd", { textContent: `${ms < 10 ? ms.toFixed(1) : Math.round(ms)} ms` }),
        ]),
      ),
    );
  },

  /** One stack a round: what was kept, what was refused, the target's own token. */
  round({ path, source }, rejected) {
    const strip = $("strip");
    const square = (fate, from) => mark(element("i"), fate, from);
    const stack = element("div", {}, [
      ...path.map(() => square("accepted", source)),
      ...rejected.map(() => square("rejected", source)),
      square(rejected.length ? "recovered" : "bonus", ""),
    ]);
    stack.dataset.round = strip.childElementCount;
    strip.append(stack);
    strip.scrollLeft = strip.scrollWidth;
  },
};

// --- the guesses of one round: of the latest, or of the one that is pointed at ------------------------

const trees = {
  reset() {
    this.index = -1;
    this.isChosen = false;
    this.clear("Guesses of a round");
  },

  clear(title) {
    $("tree-title").textContent = title;
    $("tree").replaceChildren();
  },

  /** The latest round, unless another one was chosen. */
  follow() {
    if (!this.isChosen) this.draw(lanes.on.rounds.length - 1);
  },

  choose(index) {
    if (!lanes.on.rounds[index]) return;
    this.release();
    this.draw(index);
    this.isChosen = true;
    lanes.on.rounds[index].spans.forEach((span) => span.classList.add("pointed"));
  },

  release() {
    if (this.isChosen) lanes.on.rounds[this.index].spans.forEach((span) => span.classList.remove("pointed"));
    this.isChosen = false;
  },

  draw(index) {
    const { tree, own } = lanes.on.rounds[index];
    const num = tree.token_ids.length;
    const guesses = `${num} ${num === 1 ? "guess" : "guesses"} of ${tree.source}, ${tree.path.length} kept`;
    this.index = index;
    this.clear(`Round ${index + 1}: ${num ? guesses : "no guesses"}`);
    const root = element("span", { className: "node", textContent: "…", title: "the text before" });
    $("tree").append(element("li", {}, [root, branches(tree, own, -1)]));
  },
};

/** What follows a guess, or the text before (-1): guesses, and the target's own token where the path ends. */
function branches(tree, own, parent) {
  const isEnd = (tree.path.at(-1) ?? -1) === parent;
  const parents = tree.parents.length ? tree.parents : tree.token_ids.map((_, i) => i - 1);
  const items = tree.texts.flatMap((text, i) => {
    if (parents[i] !== parent) return [];
    const fate = tree.path.includes(i) ? "accepted" : isEnd ? "rejected" : "dropped";
    return [branch({ text, fate, source: tree.source }, branches(tree, own, i))];
  });
  if (isEnd && own) items.unshift(branch(own));
  return items.length ? element("ul", {}, items) : "";
}

function branch(token, following = "") {
  const node = element("span", { className: "node", textContent: visible(token.text).replaceAll(" ", "·") });
  node.title = token.fate;
  return mark(element("li", {}, [node, following]), token.fate, token.source);
}

function percent(part, whole) {
  return whole ? `${Math.round((100 * part) / whole)} %` : "–";
}

function stageMark(name) {
  const square = element("i");
  square.dataset.stage = name;
  return square;
}

// --- run and race --------------------------------------------------------------------------------------

const lanes = { on: new Lane("on"), off: new Lane("off") };

function settings() {
  const number = (id) => $(id).valueAsNumber;
  const drafts = $("draft-tokens").value;
  return {
    prompt: $("prompt").value,
    max_tokens: number("max-tokens"),
    temperature: number("temperature"),
    seed: number("seed"),
    speculating: drafts ? { num_draft_tokens: Number(drafts) } : {},
  };
}

async function fill(lane, body, watch, signal) {
  lane.start();
  let record = null;
  try {
    for await (const event of generate(body, signal)) {
      const chunk = event.choices[0]?.specwire;
      if (chunk) {
        lane.add(chunk);
        watch?.add(chunk);
      }
      record = event.specwire?.[0] ?? record;
    }
  } finally {
    lane.end(record);
  }
}

async function run(asked, signal) {
  say("Running …");
  await fill(lanes.on, request(asked, asked.speculating), live, signal);
  const { num_draft_tokens: drafted, num_accepted_tokens: accepted } = lanes.on.record.speculation;
  say(`Done: ${lanes.on.ids.length} tokens in ${lanes.on.seconds.toFixed(2)} s; ${accepted} of ${drafted} guesses accepted.`);
}

/** The same request twice. First a short one, so that neither pays for what both find: the prompt's cache. */
async function race(asked, together, signal) {
  say("Warming up, for both …");
  for await (const _ of generate(request(asked, { max_tokens: 2 }), signal));
  const withDrafts = () => fill(lanes.on, request(asked, asked.speculating), live, signal);
  const without = () => fill(lanes.off, request(asked, { num_draft_tokens: 0 }), null, signal);
  if (together) {
    say("Racing at the same time: they share the device, so both are slower than alone.");
    await Promise.all([withDrafts(), without()]);
  } else {
    say("Racing one after the other: each has the device to itself. First with speculation …");
    await withDrafts();
    say("Now without …");
    await without();
  }
  judge(together);
}

function judge(together) {
  const { on, off } = lanes;
  const length = Math.max(on.ids.length, off.ids.length);
  const differs = Array.from({ length }, (_, i) => i).find((i) => on.ids[i] !== off.ids[i]);
  const speed = `${(off.seconds / on.seconds).toFixed(2)} × as fast as without`;
  const same = `Same text, all ${length} tokens; with speculation ${speed}.`;
  const other = `The texts differ from token ${differs} on: rounding in the model decided otherwise there.`;
  const how = together ? "Run at the same time, sharing the device." : "Run one after the other, same prompt, seed and rule (gumbel).";
  const verdict = $("verdict");
  verdict.replaceChildren(differs === undefined ? same : other, element("small", { textContent: how }));
  verdict.classList.toggle("differs", differs !== undefined);
  verdict.hidden = false;
  say("Race done.");
}

function say(text) {
  $("status").textContent = text;
}

function become(state) {
  document.body.dataset.state = state;
  const busy = state === "running";
  $("run").disabled = $("race").disabled = busy;
  $("stop").disabled = !busy;
}

function prepare(asked, racing) {
  live.reset();
  lanes.on.reset(asked.prompt, asked.max_tokens);
  lanes.off.reset(asked.prompt, asked.max_tokens);
  lanes.off.root.hidden = !racing;
  $("verdict").hidden = true;
  $("records").hidden = true;
}

async function perform(racing) {
  if (running || !$("form").reportValidity()) return;
  const asked = settings();
  running = new AbortController();
  prepare(asked, racing);
  become("running");
  try {
    if (!model) await findModel();
    await (racing ? race(asked, $("together").checked, running.signal) : run(asked, running.signal));
    $("records").hidden = false;
    become("done");
  } catch (error) {
    const stopped = running.signal.aborted;
    if (!stopped) model = ""; // the server may have changed: ask again at the next try
    running.abort(); // the other lane of a race
    say(stopped ? "Stopped." : error.message);
    become(stopped ? "idle" : "failed");
  } finally {
    running = null;
  }
}

$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  perform(false);
});
$("race").addEventListener("click", () => perform(true));
$("stop").addEventListener("click", () => running?.abort());
$("keep").addEventListener("change", () => document.body.classList.toggle("keep", $("keep").checked));
for (const shows of [lanes.on.find(".text"), $("strip")]) {
  shows.addEventListener("mouseover", ({ target }) => trees.choose(Number(target.closest("[data-round]")?.dataset.round)));
  shows.addEventListener("mouseleave", () => trees.release());
}
$("tree-before").addEventListener("click", () => trees.choose(trees.index - 1));
$("tree-after").addEventListener("click", () => trees.choose(trees.index + 1));
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) perform(false);
});
findModel().catch((error) => {
  $("model").textContent = "not connected";
  say(error.message);
});
