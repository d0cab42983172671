// Asks dflashd one question and prints the answer as it comes.
import path from 'node:path';
import {fileURLToPath} from 'node:url';
import grpc from '@grpc/grpc-js';
import loader from '@grpc/proto-loader';

const [address, question] = process.argv.slice(2);
if (!address || !question) {
  console.error('usage: chat.mjs HOST:PORT QUESTION');
  process.exit(2);
}
const proto = path.join(path.dirname(fileURLToPath(import.meta.url)), '..', '..', 'proto');
const definition = loader.loadSync('dflash/v1/inference.proto', {includeDirs: [proto], keepCase: true, enums: String, defaults: true});
const {dflash} = grpc.loadPackageDefinition(definition);
const client = new dflash.v1.InferenceService(address, grpc.credentials.createInsecure());

const stream = client.Generate(
    {chat: {messages: [{role: 'user', content: question}]}, sampling: {seed: 7}, stopping: {max_tokens: 64}},
    {deadline: Date.now() + 120_000});
stream.on('data', response => {
  if (response.chunk) process.stdout.write(response.chunk.text);
  if (response.finished) {
    console.log();
    console.error(`${response.finished.usage.completion_tokens} tokens, ${response.finished.reason}`);
  }
});
stream.on('error', error => {
  console.error(`${grpc.status[error.code]}: ${error.details}`);
  process.exitCode = 1;
});
stream.on('end', () => client.close());
