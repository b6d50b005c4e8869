// SPDX-License-Identifier: Apache-2.0
import type { Confusion } from "./confusion.ts";
import type { Checkpoint, Comparison, Ranks, Run, RunEvent, RunList, SeriesAnswer } from "./types.ts";

// Sent to the window when the sidecar no longer takes what we show it (a new token, a new browser).
export const LOGIN_NEEDED = "paramsync-login-needed";

export class ApiError extends Error {
  readonly status: number;
  readonly code: string;
  constructor(status: number, code: string, message: string) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

// Every path is relative to the page, so that the dashboard works under any sub-path.
async function get<T>(path: string, signal?: AbortSignal): Promise<T> {
  let response: Response;
  try {
    response = await fetch("api/v1/" + path, signal ? { signal } : {});
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new ApiError(0, "UNAVAILABLE", "The sidecar does not answer. Is paramsyncd running?");
  }
  if (!response.ok) {
    let code = "UNKNOWN";
    let message = `HTTP ${response.status}`;
    try {
      const body = (await response.json()) as { error?: { code?: string; message?: string } };
      code = body.error?.code ?? code;
      message = body.error?.message ?? message;
    } catch {
      // Not our JSON (a proxy's page, say): the status has to do.
    }
    if (response.status === 401) window.dispatchEvent(new Event(LOGIN_NEEDED));
    throw new ApiError(response.status, code, message);
  }
  return (await response.json()) as T;
}

export interface RunQuery {
  text?: string;
  state?: string;
  page?: string;
  limit?: number;
}

export function listRuns(query: RunQuery, signal?: AbortSignal): Promise<RunList> {
  const params = new URLSearchParams();
  if (query.text) params.set("q", query.text);
  if (query.state) params.set("state", query.state);
  if (query.page) params.set("page", query.page);
  params.set("limit", String(query.limit ?? 200));
  return get(`runs?${params}`, signal);
}

export interface Info {
  version: string;
  target: number;
  grpc_port: number | null;
}

const id = encodeURIComponent;
export const getInfo = (signal?: AbortSignal): Promise<Info> => get("info", signal);
export const getRun = (run: string, signal?: AbortSignal): Promise<Run> => get(`runs/${id(run)}`, signal);
export const getEpochs = (run: string, signal?: AbortSignal): Promise<SeriesAnswer> => get(`runs/${id(run)}/series`, signal);
export const getSeries = (run: string, name: string, signal?: AbortSignal): Promise<SeriesAnswer> =>
  get(`runs/${id(run)}/series?name=${id(name)}&rank=-1&max_points=2000`, signal);
export const getCheckpoints = (run: string, signal?: AbortSignal): Promise<{ checkpoints: Checkpoint[] }> =>
  get(`runs/${id(run)}/checkpoints`, signal);
// Null where there is none: nothing evaluated yet, or reported by a client that does not send it.
export async function getConfusion(run: string, signal?: AbortSignal): Promise<Confusion | null> {
  try {
    return await get<Confusion>(`runs/${id(run)}/confusion?epoch=best`, signal);
  } catch (error) {
    if (error instanceof ApiError && error.status === 404) return null;
    throw error;
  }
}
export const getRanks = (run: string, bins: number, signal?: AbortSignal): Promise<Ranks> => get(`runs/${id(run)}/ranks?bins=${bins}`, signal);
export const getEvents = (run: string, signal?: AbortSignal): Promise<{ events: RunEvent[] }> =>
  get(`runs/${id(run)}/events`, signal);
export const compareRuns = (runs: readonly string[], target: number, signal?: AbortSignal): Promise<Comparison> =>
  get(`compare?runs=${runs.map(id).join(",")}&target=${target}`, signal);

export async function login(token: string): Promise<boolean> {
  const response = await fetch("api/v1/session", { method: "POST", headers: { Authorization: `Bearer ${token}` } });
  if (response.ok) return true;
  if (response.status === 401) return false;
  throw new ApiError(response.status, "UNKNOWN", `HTTP ${response.status}`);
}
