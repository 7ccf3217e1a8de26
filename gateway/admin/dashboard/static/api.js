// Send one request to the operator's API. Throws an Error whose message a person can act on.
export async function request(path, options = {}) {
  const { body, ...rest } = options;
  const headers = { "content-type": "application/json" };
  const sent = body === undefined ? undefined : JSON.stringify(body);
  const response = await fetch("/admin/api/" + path, { ...rest, headers, body: sent });
  const answer = await response.json().catch(() => ({}));
  if (response.ok) return answer;
  throw new Error(answer.error?.message ?? `The gateway answered ${response.status}.`);
}
