"use strict";
// What is drawn of the rounds of a run: counts and charts, the guesses of a round, and the card of one token.

// Every moment of a generation belongs to one of them.
const STAGES = [
  "admission", "draft", "draft_queue", "draft_network", "verify", "verify_queue", "verify_network",
  "rule", "emit", "client_credit", "failover", "coordinator",
];
/** Sources of guesses that are no model. */
const METHODS = new Set(document.body.dataset.methods.split(" "));

const $ = (id) => document.getElementById(id);

function element(name, properties = {}, children = []) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

function mark(node, fate, source) {
  node.dataset.fate = fate;
  node.dataset.from = METHODS.has(source) ? "text" : source ? "model" : "target";
  return node;
}

function visible(text) {
  return text.replaceAll("\n", "⏎") || "∅";
}

function percent(part, whole) {
  return whole ? `${Math.round((100 * part) / whole)} %` : "–";
}

function milliseconds(ms) {
  return `${ms < 10 ? ms.toFixed(1) : Math.round(ms)} ms`;
}

// --- the stages of a run or of a round ----------------------------------------------------------------

function stageMark(name) {
  const square = element("i");
  square.dataset.stage = name;
  square.style.background = `var(--${name.replaceAll("_", "-")})`;
  return square;
}

/** A bar with the share of each stage, and a list with the times of those that are named. */
function drawStages(bar, list, timing, names = STAGES) {
  const parts = STAGES.map((name) => {
    const part = stageMark(name);
    part.style.width = `${(100 * timing[`${name}_ms`]) / timing.total_ms}%`;
    return part;
  });
  const rows = names.map((name) => {
    const term = element("dt", {}, [stageMark(name), name.replace("_", " ")]);
    return element("div", {}, [term, element("dd", { textContent: milliseconds(timing[`${name}_ms`]) })]);
  });
  bar.replaceChildren(...parts);
  list.replaceChildren(...rows);
}

/** What passed between two timings of a generation, over so many rounds. */
function between(before, after, numRounds) {
  const names = ["total", ...STAGES].map((name) => `${name}_ms`);
  return Object.fromEntries(names.map((name) => [name, (after[name] - (before?.[name] ?? 0)) / numRounds]));
}

// --- the live view ------------------------------------------------------------------------------------

const live = {
  reset() {
    for (const id of ["rounds", "mean-length", "rate", "prepared"]) $(id).textContent = "–";
    for (const id of ["kinds", "with-guesses"]) $(id).textContent = "";
    $("positions").replaceChildren(element("li", { className: "empty", textContent: "no guesses yet" }));
    for (const id of ["stages", "stage-times", "sources", "strip"]) $(id).replaceChildren();
    trees.reset();
    card.hide();
  },

  add({ tree, speculation, timing }) {
    this.count(speculation);
    this.sources(speculation);
    this.positions(speculation);
    drawStages($("stages"), $("stage-times"), timing);
    if (!tree) return; // a coordinator that does not send it
    this.rounds();
    trees.follow();
  },

  /** Tokens are rounds times tokens a round; rounds with guesses and without add up to them. */
  count(counts) {
    const drafts = counts.acceptance_histogram.reduce((sum, n) => sum + n, 0);
    const numPlain = counts.num_rounds - drafts;
    $("rounds").textContent = counts.num_rounds;
    $("mean-length").textContent = counts.tokens_per_round.toFixed(2);
    $("kinds").textContent = drafts && numPlain ? `${drafts} with guesses, ${numPlain} without` : "";
    if (!drafts) return;
    $("with-guesses").textContent = numPlain ? `${counts.mean_acceptance_length.toFixed(2)} with guesses` : "";
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

  /** One stack a round whose tokens are all there: what was kept, what was refused, the target's own token. */
  rounds() {
    const strip = $("strip");
    for (const round of lanes.on.rounds.slice(strip.childElementCount, lanes.on.numWhole)) {
      const tokens = [...round.tokens.slice(0, -1), ...round.rejected, ...round.tokens.slice(-1)];
      const stack = element("div", {}, tokens.map(({ fate, source }) => mark(element("i"), fate, source)));
      stack.dataset.round = strip.childElementCount;
      strip.append(stack);
      strip.scrollLeft = strip.scrollWidth;
    }
  },
};

// --- the guesses of one round: of the latest, or of the one that was chosen ---------------------------

const trees = {
  reset() {
    this.release();
    this.index = -1;
    this.clear("Guesses of a round");
  },

  clear(title) {
    $("tree-title").textContent = title;
    $("tree").replaceChildren();
  },

  /** The latest round, unless another one was chosen. */
  follow() {
    if (!this.chosen) this.draw(lanes.on.rounds.length - 1);
  },

  choose(index) {
    if (!lanes.on.rounds[index]) return;
    this.release();
    this.draw(index);
    this.chosen = lanes.on.rounds[index];
    this.chosen.spans.forEach((span) => span.classList.add("pointed"));
  },

  release() {
    this.chosen?.spans.forEach((span) => span.classList.remove("pointed"));
    this.chosen = null;
  },

  draw(index) {
    const round = lanes.on.rounds[index];
    this.index = index;
    this.clear(roundTitle(round, index));
    drawTree($("tree"), round);
  },
};

function roundTitle({ tree }, index) {
  if (!tree) return `Round ${index + 1}: arrived together with the next one`;
  const num = tree.token_ids.length;
  if (!num) return `Round ${index + 1}: no guesses`;
  return `Round ${index + 1}: ${num} ${num === 1 ? "guess" : "guesses"} of ${tree.source}, ${tree.path.length} kept`;
}

function drawTree(list, { tree, tokens }) {
  const own = tokens.find(isOwn);
  const root = element("span", { className: "node", textContent: "…", title: "the text before" });
  list.replaceChildren(...(tree ? [element("li", {}, [root, branches(tree, own, -1)])] : []));
}

/** Each round ends with a token of the target's own. */
function isOwn({ fate }) {
  return fate !== "accepted";
}

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

// --- the card: fate and source of one token, stages and guesses of its round --------------------------

const card = {
  span: null,
  isPinned: false,

  /** Of a token; pinned until it is closed, or while the pointer is there. */
  show(span, isPinned) {
    const index = Number(span.dataset.round);
    const round = lanes.on.rounds[index];
    if (!round) return;
    this.span?.classList.remove("chosen");
    Object.assign(this, { span, isPinned });
    span.classList.add("chosen");
    trees.choose(index);
    $("card-title").textContent = `${visible(span.textContent)} · ${about(span)} · ${roundTitle(round, index)}`;
    const named = STAGES.filter((name) => round.timing[`${name}_ms`] >= 0.05);
    drawStages($("card-stages"), $("card-times"), round.timing, named);
    drawTree($("card-tree"), round);
    $("card").classList.toggle("pinned", isPinned);
    $("card").hidden = false;
    this.place();
  },

  hide() {
    this.span?.classList.remove("chosen");
    Object.assign(this, { span: null, isPinned: false });
    $("card").hidden = true;
    trees.release();
  },

  /** Below the token, or above it where there is no room; on a phone the style sheet puts it at the bottom, and a
   * token that it would cover moves up. */
  place() {
    const [at, { width, height }] = [this.span.getBoundingClientRect(), $("card").getBoundingClientRect()];
    if (width >= document.documentElement.clientWidth) {
      scrollBy(0, Math.max(0, at.bottom + 16 - (innerHeight - height)));
      return;
    }
    const top = at.bottom + 8 + height < innerHeight ? at.bottom + 8 : Math.max(8, at.top - 8 - height);
    const left = Math.max(8, Math.min(at.left, document.documentElement.clientWidth - width - 8));
    Object.assign($("card").style, { top: `${top}px`, left: `${left}px` });
  },

  /** To another token of the text, but for refused ones that have passed. */
  step(by) {
    const all = [...lanes.on.find(".text").querySelectorAll(".token")];
    const spans = all.filter((span) => span.getClientRects().length || span === this.span);
    const now = spans.indexOf(this.span);
    const next = spans[now < 0 ? (by > 0 ? 0 : spans.length - 1) : now + by];
    if (!next) return;
    next.scrollIntoView({ block: "nearest" });
    this.show(next, true);
  },
};

function about({ dataset: { fate, source } }) {
  return `${fate}, ${source ? `a guess of ${source}` : "the target's own"}`;
}

function watchTokens(text) {
  const token = ({ target }) => target.closest("[data-round]");
  const isMouse = ({ pointerType }) => pointerType === "mouse";
  text.addEventListener("pointerover", (event) => {
    if (isMouse(event) && token(event) && !card.isPinned) card.show(token(event), false);
  });
  text.addEventListener("pointerleave", (event) => {
    if (isMouse(event) && !card.isPinned) card.hide();
  });
  text.addEventListener("click", (event) => (token(event) ? card.show(token(event), true) : card.hide()));
  text.addEventListener("scroll", () => card.span && card.place());
  text.addEventListener("keydown", (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!by) return;
    event.preventDefault();
    card.step(by);
  });
}

/** A round of the strip: as its own token in the text. */
function watchStrip(strip) {
  strip.addEventListener("mouseover", ({ target }) => trees.choose(Number(target.closest("[data-round]")?.dataset.round)));
  strip.addEventListener("mouseleave", () => trees.release());
}
