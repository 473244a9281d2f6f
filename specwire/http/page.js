"use strict";
// Runs, races and chats. Speaks the public API only: /v1/models, /ways, and /v1/completions and /v1/chat/completions with
// `return_fates`.

let model = "";
let pace = { least_pass_ms: 0, draft_shares_machine: false };
let running = null; // AbortController of what runs now
let conversation = []; // messages so far, where the prompt is the next one

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
  const served = (await response.json()).data[0];
  model = served.id;
  pace = served.specwire;
  $("model").textContent = model;
  $("draft").textContent = pace.draft ? `draft ${pace.draft}` : "no draft model";
  $("pace").textContent = paceInWords();
}

function paceInWords() {
  if (pace.least_pass_ms) {
    return `Paced: passes of the target take at least ${pace.least_pass_ms} ms, as of a large model on its own device.`;
  }
  if (!pace.draft_shares_machine) return "Not paced: a pass takes what it takes.";
  return "Not paced: draft and target share this machine; --least-pass-ms 30 is like a large target on its own.";
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
  const { prompt, messages, max_tokens, temperature, seed } = settings;
  const asked = { model, ...(messages ? { messages } : { prompt }), max_tokens, temperature, seed, rule: "gumbel" };
  return { ...asked, stream: true, stream_options: { include_usage: true }, return_fates: true, ...overrides };
}

async function* generate(body, signal) {
  const init = { method: "POST", headers: headers(), body: JSON.stringify(body), signal };
  const response = await fetch(body.messages ? "v1/chat/completions" : "v1/completions", init);
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
    this.said = "";
    this.rounds = [];
    this.numWhole = 0;
    this.record = this.timing = null;
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
  add({ tokens, rejected, tree, speculation, timing }) {
    const text = this.find(".text");
    const atEnd = text.scrollHeight - text.scrollTop - text.clientHeight < 40;
    this.addRounds(tree, speculation.num_rounds, timing);
    const refused = rejected.map((token) => this.shown({ ...token, text: visible(token.text) }, this.rounds.length - 1));
    this.rounds.at(-1)?.rejected.push(...rejected);
    const emitted = tokens.map((token) => this.emit(token));
    text.append(...emitted.slice(0, -1), ...refused, ...emitted.slice(-1));
    this.ids.push(...tokens.map((token) => token.id));
    this.find("progress").value = this.ids.length;
    if (atEnd) text.scrollTop = text.scrollHeight;
  }

  /** A chunk is a round, or several where the browser is slower: then it has the tree of the last one. */
  addRounds(tree, numRounds, timing) {
    const spent = between(this.timing, timing, Math.max(1, numRounds - this.rounds.length));
    while (this.rounds.length < numRounds) {
      this.rounds.push({ tree: null, timing: spent, spans: [], tokens: [], rejected: [] });
    }
    if (numRounds) this.rounds.at(-1).tree = tree;
    this.timing = timing;
  }

  /** A round ends with a token of the target's own; some of its tokens may come with a later chunk. */
  emit(token) {
    const span = this.shown(token, this.numWhole);
    this.rounds[this.numWhole]?.tokens.push(token);
    this.numWhole += isOwn(token);
    return span;
  }

  shown(token, index) {
    const span = element("span", { className: "token", textContent: token.text });
    mark(span, token.fate, token.source);
    Object.assign(span.dataset, { round: index, source: token.source });
    span.classList.toggle("rejected", token.fate === "rejected");
    this.rounds[index]?.spans.push(span);
    return span;
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

// --- run and race --------------------------------------------------------------------------------------

const lanes = { on: new Lane("on"), off: new Lane("off") };

function settings() {
  const number = (id) => $(id).valueAsNumber;
  const drafts = $("draft-tokens").value;
  return {
    prompt: $("prompt").value,
    messages: $("chat").checked ? [...conversation, { role: "user", content: $("prompt").value }] : null,
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
      lane.said += event.choices[0]?.delta?.content ?? "";
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
  const { num_draft_tokens: drafted, num_accepted_tokens: accepted, why_plain: why } = lanes.on.record.speculation;
  const guesses = why ? `decoded plainly: ${why}` : `${accepted} of ${drafted} guesses accepted`;
  say(`Done: ${lanes.on.ids.length} tokens in ${lanes.on.seconds.toFixed(2)} s; ${guesses}.`);
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
  const times = off.seconds / on.seconds;
  const speed = `${times.toFixed(2)} × as fast as without`;
  const same = `Same text, all ${length} tokens; with speculation ${speed}.`;
  const other = `The texts differ from token ${differs} on: rounding in the model decided otherwise there.`;
  const how = together ? "Run at the same time, sharing the device." : "Run one after the other, same prompt, seed and rule (gumbel).";
  const lines = [...(times < EVEN[1] ? [whyNotFaster()] : []), `${paceInWords()} ${how}`];
  const verdict = $("verdict");
  verdict.replaceChildren(
    element("p", { textContent: differs === undefined ? same : other }),
    ...lines.map((textContent) => element("small", { textContent })),
  );
  verdict.dataset.kind = differs !== undefined ? "differs" : times >= EVEN[1] ? "faster" : times > EVEN[0] ? "even" : "slower";
  verdict.hidden = false;
  verdict.scrollIntoView({ block: "nearest" });
  say("Race done.");
}

/** Times of plain decoding that two runs of the same may differ by. */
const EVEN = [0.98, 1.02];

/** By where the time of a round went: what a proposal costs, what guesses add to a pass, what they bring. */
function whyNotFaster() {
  const [counts, plain] = [lanes.on.record.speculation, lanes.off.record.speculation];
  if (counts.why_plain) return `Decoded plainly: ${counts.why_plain}.`;
  const [withDrafts, without] = [perRound(lanes.on, counts.num_rounds), perRound(lanes.off, plain.num_rounds)];
  return (
    `A round brought ${counts.tokens_per_round.toFixed(2)} tokens and took as long as ` +
    `${(withDrafts.total / without.total).toFixed(2)} plain ones: ${(withDrafts.draft / without.verify).toFixed(2)} ` +
    `plain passes for the proposal, ${(withDrafts.verify / without.verify).toFixed(2)} for the pass with guesses.`
  );
}

/** Milliseconds a round: in all, until the proposal was there, and until the verdict was. */
function perRound({ record: { timing } }, numRounds) {
  const of = (stage) => (timing[`${stage}_ms`] + timing[`${stage}_queue_ms`] + timing[`${stage}_network_ms`]) / numRounds;
  return { total: timing.total_ms / numRounds, draft: of("draft"), verify: of("verify") };
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

/** What comes before the answer: the prompt, or all that was said. */
function given({ prompt, messages }) {
  return messages ? messages.map(({ role, content }) => `${role}: ${content}\n\n`).join("") + "assistant: " : prompt;
}

/** The answer belongs to the conversation from now on, and the next message is to be written. */
function goOn({ messages }) {
  if (!messages) return;
  conversation = [...messages, { role: "assistant", content: lanes.on.said }];
  $("prompt").value = "";
}

function prepare(asked, racing) {
  live.reset();
  for (const lane of [lanes.on, lanes.off]) lane.reset(given(asked), asked.max_tokens);
  lanes.off.root.hidden = !racing;
  $("lanes").classList.toggle("racing", racing);
  $("verdict").hidden = true;
  $("records").hidden = true;
}

async function perform(racing) {
  if (running || !$("form").reportValidity()) return;
  const asked = settings();
  running = new AbortController();
  prepare(asked, racing);
  become("running");
  $("status").scrollIntoView({ block: matchMedia("(max-width: 40rem)").matches ? "start" : "nearest" });
  try {
    if (!model) await findModel();
    await (racing ? race(asked, $("together").checked, running.signal) : run(asked, running.signal));
    goOn(asked);
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
$("chat").addEventListener("change", () => (conversation = [])); // a new one
$("keep").addEventListener("change", () => document.body.classList.toggle("keep", $("keep").checked));
watchTokens(lanes.on.find(".text"));
watchStrip($("strip"));
$("card-close").addEventListener("click", () => card.hide());
$("tree-before").addEventListener("click", () => trees.choose(trees.index - 1));
$("tree-after").addEventListener("click", () => trees.choose(trees.index + 1));
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") card.span ? card.hide() : running?.abort();
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) perform(false);
});
$("ways").addEventListener("toggle", followWays);
findModel().catch((error) => {
  $("model").textContent = "not connected";
  say(error.message);
});
