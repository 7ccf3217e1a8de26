// What tests/clients/clients_test.py asks of the openai package for Node.
import OpenAI from "openai";

const client = new OpenAI({ maxRetries: 0 });
const model = process.env.MICO_MODEL;
const asked = { model, messages: [{ role: "user", content: "Hello there" }], temperature: 0, max_tokens: 24 };
const city = {
  type: "object",
  properties: { city: { enum: ["Oslo", "Rome"] }, days: { type: "integer", minimum: 1, maximum: 9 } },
  required: ["city", "days"],
  additionalProperties: false,
};

const models = [];
for await (const each of client.models.list()) models.push(each.id);
const chat = await client.chat.completions.create(asked);
const streamed = [];
for await (const chunk of await client.chat.completions.create({ ...asked, stream: true })) {
  const text = chunk.choices[0]?.delta?.content;
  if (text) streamed.push(text);
}
const held = await client.chat.completions.create({
  ...asked,
  max_tokens: 200,
  response_format: { type: "json_schema", json_schema: { name: "city", strict: true, schema: city } },
});
let refused = { status: 0, message: "it was not refused" };
try {
  await client.chat.completions.create({ ...asked, model: "no-such-model" });
} catch (error) {
  if (error instanceof OpenAI.NotFoundError) refused = { status: error.status, message: error.message };
}
console.log(
  JSON.stringify({
    models,
    chat: chat.choices[0].message.content,
    streamed,
    held: JSON.parse(held.choices[0].message.content),
    refused,
  }),
);
