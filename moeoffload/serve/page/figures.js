// The same arithmetic as moeoffload/rates.py; a test compares the two.
"use strict";
const NOW_S = 3, STEP_S = 10, LATENCY_S = 60, EPSILON_S = 1e-6, MOST_KEPT = 1000;
const PARTS = ["dense", "pack", "wire", "queue", "compute", "local", "combine", "other"];
const LAYER_PARTS = PARTS.slice(0, -1);

class History {
  constructor() { this.kept = []; }

  // Whether the host is still the one of the snapshots before.
  add(snapshot) {
    const kept = this.kept, again = kept.length > 0 && snapshot.uptime_s < this.newest.uptime_s;
    if (again) kept.length = 0;
    if (kept.length && this.newest.uptime_s === snapshot.uptime_s) kept.pop();
    kept.push(snapshot);
    const limit = snapshot.uptime_s - LATENCY_S + EPSILON_S;
    while (kept.length > 2 && (kept[1].uptime_s <= limit || kept.length > MOST_KEPT)) kept.shift();
    return !again;
  }

  get newest() { return this.kept[this.kept.length - 1]; }

  before(seconds) {
    const limit = this.newest.uptime_s - seconds + EPSILON_S;
    for (let i = this.kept.length - 1; i >= 0; i--) if (this.kept[i].uptime_s <= limit) return this.kept[i];
    return this.kept[0];
  }

  // What a server told first of its batches; the first looks at a host come before that.
  firstBatches(address) {
    for (const snapshot of this.kept) {
      const server = snapshot.servers.find((each) => each.address === address && each.batches);
      if (server) return server.batches.members;
    }
    return null;
  }
}

const rate = (difference, seconds) => seconds > 0 ? difference / seconds : 0;
const share = (part, whole) => whole ? part / whole : null;
const sum = (values) => values.reduce((total, value) => total + value, 0);

function histogramDifference(now, old) {
  if (now.n < old.n) return now;
  return {
    bounds: now.bounds, counts: now.counts.map((count, i) => count - old.counts[i]),
    total: now.total - old.total, n: now.n - old.n,
  };
}

function quantile(histogram, part) {
  if (histogram.n <= 0) return null;
  const wanted = part * histogram.n;
  let below = 0, lower = 0;
  for (let i = 0; i < histogram.bounds.length; i++) {
    const count = histogram.counts[i], bound = histogram.bounds[i];
    if (count && below + count >= wanted) return lower + (bound - lower) * (wanted - below) / count;
    below += count;
    lower = bound;
  }
  return lower;
}

function latency(now, old) {
  const difference = histogramDifference(now, old);
  return [quantile(difference, 0.5), quantile(difference, 0.95)];
}

function layerTimes(now, old) {
  const calls = now.map((layer, i) => layer.calls - old[i].calls);
  if (!calls.some(Boolean)) return [];
  return now.map((layer, i) => Object.fromEntries(LAYER_PARTS.map((part) =>
    [part, calls[i] ? (layer[part + "_s"] - old[i][part + "_s"]) / calls[i] : 0])));
}

function serverLoad(server, before, seconds) {
  const old = before.find((each) => each.address === server.address) || server;
  const calls = server.calls - old.calls;
  return {
    server,
    callsPerS: rate(calls, seconds),
    rowsPerS: rate(server.rows - old.rows, seconds),
    bytesPerS: rate(server.bytes_out + server.bytes_back - old.bytes_out - old.bytes_back, seconds),
    busy: Math.min(1, rate(server.compute_s - old.compute_s, seconds)),
    waitS: share(server.wait_s - old.wait_s, calls) || 0,
  };
}

function batchMembers(now, history) {
  const parts = [];
  for (const server of now) {
    if (!server.batches) continue;
    parts.push(histogramDifference(server.batches.members, history.firstBatches(server.address)));
  }
  if (!parts.length) return null;
  return {
    bounds: parts[0].bounds, counts: parts[0].counts.map((_, i) => sum(parts.map((part) => part.counts[i]))),
    total: sum(parts.map((part) => part.total)), n: sum(parts.map((part) => part.n)),
  };
}

function figures(history) {
  const now = history.newest, old = history.before(NOW_S);
  const older = history.before(STEP_S), oldest = history.before(LATENCY_S);
  const seconds = now.uptime_s - old.uptime_s, steps = now.steps.steps - older.steps.steps;
  const rows = histogramDifference(now.step_rows, oldest.step_rows);
  const stepParts = Object.fromEntries(PARTS.map((part) =>
    [part, steps ? (now.steps[part + "_s"] - older.steps[part + "_s"]) / steps : 0]));
  return {
    tokensPerS: rate(now.tokens.completion - old.tokens.completion, seconds),
    promptPerS: rate(now.tokens.prompt - old.tokens.prompt, seconds),
    stepsPerS: rate(now.steps.steps - old.steps.steps, seconds),
    reuse: share(now.tokens.reused, now.tokens.prompt),
    cacheUse: share(now.cache.used_tokens + now.cache.kept_tokens, now.cache.total_tokens),
    firstToken: latency(now.first_token_s, oldest.first_token_s),
    betweenTokens: latency(now.between_tokens_s, oldest.between_tokens_s),
    rows, rowsPerStep: share(rows.total, rows.n),
    stepS: share(now.steps.seconds - older.steps.seconds, steps), stepParts,
    layers: layerTimes(now.layers, older.layers),
    servers: now.servers.map((server) => serverLoad(server, old.servers, seconds)),
    members: batchMembers(now.servers, history),
  };
}
