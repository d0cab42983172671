// Checks Kubernetes documents against typed schemas, and dashboards against Grafana's: wrong and missing fields by the validators
// of kubernetes-models, unknown fields by the TypeScript compiler, which takes an object literal for no more than its type has.
//   node check_documents.mjs FOLDER    FOLDER has documents.json: [{place, document}], dashboards.json: [{place, document}]
// Prints one line for each fault; exit code 1 when there are any. The packages are looked for beside this file.
import {execFileSync} from 'node:child_process';
import {existsSync, readFileSync, writeFileSync} from 'node:fs';
import {dirname, join} from 'node:path';
import {fileURLToPath} from 'node:url';

const here = dirname(fileURLToPath(import.meta.url));
const folder = process.argv[2];
const faults = [];

// The module of a kind, e.g. kubernetes-models/apps/v1/Deployment.
function moduleOf({apiVersion, kind}) {
  const group = apiVersion.includes('/') ? apiVersion.split('/')[0] : '';
  const own = {'monitoring.coreos.com': '@kubernetes-models/prometheus-operator/', 'keda.sh': '@kubernetes-models/keda/'};
  const core = apiVersion.replace(/^rbac\/|^policy\//, (text) => text);
  return group in own ? `${own[group]}${apiVersion}/${kind}` : `kubernetes-models/${core}/${kind}`;
}

// There is no package with types of the LeaderWorkerSet; what we use of it, by its documentation (leaderworkerset.x-k8s.io/v1).
const LWS = `
import type {IPodTemplateSpec} from 'kubernetes-models/v1/PodTemplateSpec';
import type {IObjectMeta} from '@kubernetes-models/apimachinery/apis/meta/v1/ObjectMeta';
interface ILeaderWorkerSet {
  apiVersion: 'leaderworkerset.x-k8s.io/v1'; kind: 'LeaderWorkerSet'; metadata: IObjectMeta;
  spec: {
    replicas?: number;
    leaderWorkerTemplate: {
      leaderTemplate?: IPodTemplateSpec; workerTemplate: IPodTemplateSpec; size?: number;
      restartPolicy?: 'None' | 'RecreateGroupOnPodRestart' | 'RecreateGroupAfterStart';
    };
    rolloutStrategy?: {type: 'RollingUpdate'; rollingUpdateConfiguration?: {partition?: number; maxUnavailable?: number | string; maxSurge?: number | string}};
    startupPolicy?: 'LeaderCreated' | 'LeaderReady';
    networkConfig?: {subdomainPolicy?: 'Shared' | 'UniquePerReplica'};
  };
}
`;

const documents = JSON.parse(readFileSync(join(folder, 'documents.json')));
const dashboards = JSON.parse(readFileSync(join(folder, 'dashboards.json')));
const places = [];  // of the variables in the program below, by line
const lines = [];
const add = (text, place) => {
  for (const line of text.split('\n')) {
    lines.push(line);
    places.push(place);
  }
};

for (const [index, {place, document}] of documents.entries()) {
  if (document.kind === 'LeaderWorkerSet') {
    const {PodTemplateSpec} = await import('kubernetes-models/v1/PodTemplateSpec');
    try {
      new PodTemplateSpec(document.spec.leaderWorkerTemplate.workerTemplate).validate();
    } catch (error) {
      faults.push(`${place}: ${error.message}`);
    }
    if (!lines.includes('// LWS')) add(LWS + '// LWS', '');
    add(`export const d${index}: ILeaderWorkerSet = ${JSON.stringify(document, null, 1)};`, place);
    continue;
  }
  const name = moduleOf(document);
  if (!existsSync(join(here, 'node_modules', `${name}.js`))) {
    faults.push(`${place}: there is no kind ${document.apiVersion} ${document.kind}`);
    continue;
  }
  const kind = (await import(name))[document.kind];
  try {
    new kind(document).validate();
  } catch (error) {
    faults.push(`${place}: ${error.message}`);
  }
  add(`import type {I${document.kind} as I${index}} from '${name}';`, place);
  add(`export const d${index}: I${index} = ${JSON.stringify(document, null, 1)};`, place);
}

// JSON has strings where Grafana's types have enumerations of strings.
if (dashboards.length > 0) {
  add(`import type {AnnotationQuery, Dashboard} from '@grafana/schema';
type Relaxed<T> = T extends string ? (string extends T ? T : \`\${T}\`) : T extends number ? T | number : T extends boolean ? T
  : T extends (infer E)[] ? Relaxed<E>[] : T extends Record<string, unknown> | object ? {[K in keyof T]: Relaxed<T[K]>} : T;
// What a query of Prometheus adds to an annotation.
type Annotation = Relaxed<AnnotationQuery> & {expr?: string; titleFormat?: string};
type Board = Relaxed<Omit<Dashboard, 'annotations'>> & {annotations: {list: Annotation[]}};`, '');
  for (const [index, {place, document}] of dashboards.entries()) {
    add(`export const g${index}: Board = ${JSON.stringify(document, null, 1)};`, place);
  }
}

const program = join(here, 'documents.ts');
writeFileSync(program, lines.join('\n'));
try {
  execFileSync(process.execPath, [join(here, 'node_modules', 'typescript', 'bin', 'tsc'), '--noEmit', '--strict', '--skipLibCheck',
                                  '--target', 'es2022', '--module', 'nodenext', program], {encoding: 'utf8'});
} catch (error) {
  for (const line of (error.stdout + error.stderr).split('\n')) {
    const found = line.match(/documents\.ts\((\d+),\d+\): (.*)/);
    if (found) faults.push(`${places[found[1] - 1]}: ${lines[found[1] - 1].trim()}: ${found[2]}`);
    else if (line.trim() !== '' && !line.startsWith(' ')) faults.push(line);
  }
}
for (const fault of faults) console.log(fault);
process.exit(faults.length > 0 ? 1 : 0);
