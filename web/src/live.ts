// SPDX-License-Identifier: Apache-2.0
// One event stream for all tabs: browsers open six connections a host, and ten open dashboards must not use them up.
// The tab that holds the lock reads the stream and passes it on over a BroadcastChannel; when it closes, the lock goes
// to another tab, which resumes after the last event seen. Without Web Locks (plain http on another host) each tab
// opens its own stream.
import type { RunEvent } from "./types.ts";

export type LiveState = "connecting" | "live" | "lost";
type Message = { kind: "event"; event: RunEvent } | { kind: "state"; state: LiveState } | { kind: "ask" } | { kind: "reset"; id: number };

const RETRY_MS = 2000;
const SILENCE_MS = 40000; // the server sends something at least every 15 s

const eventListeners = new Set<(event: RunEvent | null) => void>();
const stateListeners = new Set<(state: LiveState) => void>();
let state: LiveState = "connecting";
let lastId = 0;
let channel: BroadcastChannel | null = null;
let leading = false;

function setState(next: LiveState): void {
  if (next === state) return;
  // What happened while nobody listened is not known: everyone reads afresh.
  const healed = state === "lost" && next === "live";
  state = next;
  for (const listener of stateListeners) listener(state);
  if (healed) deliver(null);
}

function deliver(event: RunEvent | null): void {
  if (event) {
    if (event.id <= lastId) return;
    lastId = event.id;
  }
  for (const listener of eventListeners) listener(event);
}

function share(message: Message): void {
  channel?.postMessage(message);
}

function lead(): void {
  leading = true;
  let source: EventSource | null = null;
  let heard = Date.now();
  const connect = (): void => {
    source?.close();
    heard = Date.now();
    source = new EventSource(lastId ? `api/v1/events?since=${lastId}` : "api/v1/events");
    const alive = (): void => {
      heard = Date.now();
      setState("live");
      share({ kind: "state", state: "live" });
    };
    source.onopen = alive;
    source.addEventListener("ping", alive);
    source.addEventListener("reset", (message) => {
      lastId = Number((message as MessageEvent<string>).lastEventId) || 0;
      deliver(null);
      share({ kind: "reset", id: lastId });
    });
    source.addEventListener("run", (message) => {
      alive();
      const event = JSON.parse((message as MessageEvent<string>).data) as RunEvent;
      deliver(event);
      share({ kind: "event", event });
    });
    source.onerror = () => {
      setState("lost");
      share({ kind: "state", state: "lost" });
      // The browser retries by itself unless the answer was an error status; then it gives up and we go on.
      if (source?.readyState === EventSource.CLOSED) window.setTimeout(connect, RETRY_MS);
    };
  };
  connect();
  window.setInterval(() => {
    if (Date.now() - heard > SILENCE_MS) connect();
  }, 5000);
}

export function startLive(): void {
  if (typeof BroadcastChannel === "function") {
    // One channel per folder: two sidecars behind one host name must not mix.
    channel = new BroadcastChannel("paramsync:" + new URL(".", location.href).pathname);
    channel.onmessage = (message: MessageEvent<Message>) => {
      const data = message.data;
      if (data.kind === "event") deliver(data.event);
      else if (data.kind === "state") setState(data.state);
      else if (data.kind === "reset") {
        lastId = data.id; // a store that was replaced counts anew
        deliver(null);
      }
      else if (leading) share({ kind: "state", state });
    };
  }
  if (channel && navigator.locks) {
    share({ kind: "ask" });
    void navigator.locks.request("paramsync-stream:" + new URL(".", location.href).pathname, () => {
      lead();
      return new Promise<void>(() => undefined); // held until the tab closes
    });
  } else {
    channel = null;
    lead();
  }
}

// event null: events may have been missed, read everything again. Returns how to stop.
export function onEvent(listener: (event: RunEvent | null) => void): () => void {
  eventListeners.add(listener);
  return () => eventListeners.delete(listener);
}

export function onLiveState(listener: (state: LiveState) => void): () => void {
  stateListeners.add(listener);
  listener(state);
  return () => stateListeners.delete(listener);
}
