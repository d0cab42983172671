// Adds to vectors of make-chat-template-vectors.py what @huggingface/jinja, a JavaScript implementation, answers where
// it differs from Jinja2: snippets get its text as "huggingface" (null: it throws), chats "huggingface_differs". Says on
// stderr how often they agree. Known differences: JavaScript has one kind of number (3.0 prints as 3, 2^53 + 1 is not
// itself), its trim takes U+FEFF away, booleans print in lower case, and parts of the language are missing.
//   npm install --ignore-scripts && node answer-with-huggingface-jinja.mjs [TEMPLATE_FILE_OR_TOKENIZER_CONFIG] < FILE > FILE
import fs from 'node:fs';
import { Template } from '@huggingface/jinja';

const [path] = process.argv.slice(2);
let source = path && fs.readFileSync(path, 'utf8');
let special = {};
if (path?.endsWith('.json')) {
  const config = JSON.parse(source);
  source = config.chat_template;
  for (const name of ['bos_token', 'eos_token', 'pad_token', 'unk_token']) if (config[name]) special[name] = config[name];
}
let variables = {};
const counts = { agree: 0, differ: 0 };
for (const line of fs.readFileSync(0, 'utf8').trimEnd().split('\n')) {
  const vector = JSON.parse(line);
  if (vector.variables) {
    variables = vector.variables;
    console.log(line);
    continue;
  }
  if (vector.template?.includes('strftime_now')) {  // the time of day
    console.log(line);
    continue;
  }
  let answer = null;
  try {
    answer = new Template(source ?? vector.template).render(
      source ? { documents: null, ...special, ...vector.options, messages: vector.messages, tools: vector.tools } : variables);
  } catch {
    // it refuses
  }
  if (answer === (vector.text ?? null)) {
    ++counts.agree;
    console.log(line);
  } else {
    ++counts.differ;
    if (source) {
      console.log(`${line.slice(0, -1)},"huggingface_differs":true}`);
      continue;
    }
    // Written as the Python script does, so that nothing but the answer is added.
    const escaped = JSON.stringify(answer).replace(/[\u007f-\uffff]/g, (c) => '\\u' + c.charCodeAt(0).toString(16).padStart(4, '0'));
    console.log(`${line.slice(0, -1)},"huggingface":${escaped}}`);
  }
}
console.error(`agree: ${counts.agree}, differ: ${counts.differ}`);
