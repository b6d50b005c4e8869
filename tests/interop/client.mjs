// SPDX-License-Identifier: Apache-2.0
// gRPC's interop cases (see client.cc) by @grpc/grpc-js: node client.mjs ADDRESS PROTO_DIR GRPC_PROTO_DIR
import grpc from '@grpc/grpc-js';
import loader from '@grpc/proto-loader';

const [address, protos, grpcProtos] = process.argv.slice(2);
const load = (file) => grpc.loadPackageDefinition(loader.loadSync(file, {
  includeDirs: [protos, grpcProtos], longs: Number, defaults: true, bytes: Buffer }));
const { Probe } = load('paramsync/test/v1/probe.proto').paramsync.test.v1;
const { Health } = load('grpc/health/v1/health.proto').grpc.health.v1;
const options = { 'grpc.enable_http_proxy': 0 };
const client = new Probe(address, grpc.credentials.createInsecure(), options);
const within = (seconds) => ({ deadline: Date.now() + seconds * 1000 });
let failures = 0;

function check(name, good, why = '') {
  console.log(good ? `ok ${name}` : `FAILED ${name}: ${why}`);
  failures += good ? 0 : 1;
}

const unary = (method, request, metadata = new grpc.Metadata(), call = within(20)) => new Promise((resolve) => {
  let trailing;
  const sent = client[method](request, metadata, call, (error, answer) =>
    setImmediate(() => resolve({ error, answer, trailing })));
  sent.on('status', (status) => { trailing = status.metadata; });
});
const told = ({ error }) => (error ? `${error.code} ${JSON.stringify(error.details)}` : 'OK');

let got = await unary('Echo', {});
check('empty_unary', !got.error && got.answer.text === '' && got.answer.number === 0, told(got));
const large = Buffer.alloc(271828, 7);
got = await unary('Echo', { data: large, number: 314159 });
check('large_unary', !got.error && got.answer.number === 314159 && large.equals(got.answer.data), told(got));
const packing = new Probe(address, grpc.credentials.createInsecure(), { ...options, 'grpc.default_compression_algorithm': 2 });
got = await new Promise((resolve) => packing.Echo({ data: large }, within(20), (error, answer) => resolve({ error, answer })));
check('client_compressed_unary', !got.error && large.equals(got.answer.data), told(got));
packing.close();

got = await new Promise((resolve) => {
  const call = client.Sum(new grpc.Metadata(), within(20), (error, answer) => resolve({ error, answer }));
  for (const number of [27182, 8, 1828, 45904]) call.write({ number });
  call.end();
});
check('client_streaming', !got.error && got.answer.number === 74922, told(got));

const collect = (call) => new Promise((resolve) => {
  const notes = [];
  let error = null;
  call.on('data', (note) => notes.push(note));
  call.on('error', (e) => { error = e; });
  call.on('status', () => setImmediate(() => resolve({ error, notes })));
});
got = await collect(client.Count({ number: 4, data: Buffer.alloc(58979) }, new grpc.Metadata(), within(20)));
check('server_streaming', !got.error && got.notes.map((n) => n.number).join() === '1,2,3,4', told(got));

got = await new Promise((resolve) => {
  const texts = ['a', 'bb', 'ccc', 'dddd'];
  const call = client.Chat(new grpc.Metadata(), within(20));
  let at = 0;
  let right = true;
  call.on('data', (note) => {
    right = right && note.text === texts[at];
    at += 1;
    if (at < texts.length) call.write({ text: texts[at] });
    else call.end();
  });
  call.on('error', (error) => resolve({ error, right: false }));
  call.on('end', () => resolve({ error: null, right: right && at === 4 }));
  call.write({ text: texts[0] });
});
check('ping_pong', got.right, told(got));
const empty = client.Chat(new grpc.Metadata(), within(20));
empty.end();
got = await collect(empty);
check('empty_stream', !got.error && got.notes.length === 0, told(got));

got = await new Promise((resolve) => {
  const call = client.Sum(new grpc.Metadata(), within(20), (error, answer) => resolve({ error, answer }));
  call.cancel();
});
check('cancel_after_begin', got.error?.code === grpc.status.CANCELLED, told(got));
got = await new Promise((resolve) => {
  const call = client.Chat(new grpc.Metadata(), within(20));
  let first = false;
  call.on('data', () => { first = true; call.cancel(); });
  call.on('error', (error) => resolve({ error, first }));
  call.write({ text: 'one' });
});
check('cancel_after_first_response', got.first && got.error.code === grpc.status.CANCELLED, told(got));
got = await unary('Echo', { text: 'wait' }, new grpc.Metadata(), within(0.1));
check('timeout_on_sleeping_server', got.error?.code === grpc.status.DEADLINE_EXCEEDED, told(got));
for (const [name, message] of [['status_code_and_message', 'test status message'],
  ['special_status_message', '\t\ntest with whitespace\r\nand Unicode BMP \u263a and non-BMP \u{1f608}\t\n']]) {
  got = await unary('Echo', { text: 'status', number: -2, words: [message] });
  check(name, got.error?.code === grpc.status.UNKNOWN && got.error.details === message, told(got));
}
const metadata = new grpc.Metadata();
metadata.set('x-grpc-test-echo-initial', 'test_initial_metadata_value');
got = await unary('Echo', { text: 'metadata', words: ['x-grpc-test-echo-initial'] }, metadata);
check('custom_metadata: up', got.answer?.text === 'test_initial_metadata_value', told(got));
got = await unary('Echo', { text: 'trailer', words: ['x-grpc-test-trailing', 'value'] });
check('custom_metadata: down', got.trailing?.get('x-grpc-test-trailing')[0] === 'value', told(got));

for (const [name, path] of [['unimplemented_method', '/paramsync.test.v1.Probe/Nothing'], ['unimplemented_service', '/nobody.Nobody/Nothing']]) {
  got = await new Promise((resolve) => client.makeUnaryRequest(path, (b) => b, (b) => b, Buffer.alloc(0), new grpc.Metadata(),
    within(20), (error) => resolve({ error })));
  check(name, got.error?.code === grpc.status.UNIMPLEMENTED, told(got));
}
const health = new Health(address, grpc.credentials.createInsecure(), options);
got = await new Promise((resolve) => health.Check({ service: 'paramsync.test.v1.Probe' }, within(20), (error, answer) => resolve({ error, answer })));
check('health', got.answer?.status === 'SERVING' || got.answer?.status === 1, told(got));
const many = await Promise.all(Array.from({ length: 200 }, (_, number) => unary('Echo', { number, data: Buffer.alloc(5000, number) })));
check('concurrent_unary', many.every((one, number) => one.answer?.number === number), 'an answer is missing or another call\'s');
health.close();
client.close();
process.exitCode = failures ? 1 : 0;
