#!/usr/bin/python3
"""The chart, rendered by Helm 3 and Helm 4: what is rendered is what was reviewed (golden/), it passes typed schemas, and its parts fit
together: names, ports, probes, grace periods, disruption budgets, GPUs. Wrong values are refused with their path.

  tests/deploy/chart_test.py --update    writes golden/ anew; look at the difference
"""
import functools
import json
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

sys.dont_write_bytecode = True
import yaml

import support

CHART = support.ROOT / 'helm' / 'dflashd'
GOLDEN = pathlib.Path(__file__).parent / 'golden'
PROFILES = sorted(path.stem for path in (CHART / 'profiles').glob('*.yaml'))
SHUTDOWN_SECONDS = 2 + 10  # daemon/main.cc: connections, then groups
FROM_FILES = ('PrometheusRule', 'ConfigMap')


def helm(version):
    path = support.deploy_tools() / ('helm%d' % version)
    if not path.is_file():
        raise unittest.SkipTest('there is no %s (tools/install-deploy-tools, which needs npm)' % path.name)
    return path


@functools.lru_cache(maxsize=None)
def render(profile, *more, version=3):
    return support.run(helm(version), 'template', 'rel', CHART, '--namespace', 'llm', '--values', CHART / 'profiles' / (profile + '.yaml'), *more)


def documents(text):
    return [document for document in yaml.safe_load_all(text) if document]


def reviewed(text):
    """What golden/ holds: everything but dashboards and rules, which are files of the chart (and compared with them), in a fixed order:
    Helm 3 and 4 order kinds alike but not always documents of one kind."""
    parts = [part.strip('\n') for part in re.split(r'^---$', text, flags=re.M) if part.strip()]
    kept = []
    for part in parts:
        document = yaml.safe_load(part)
        if document and not is_from_file(document):
            kept.append(re.sub(r' +$', '', part, flags=re.M))
    return '---\n' + '\n---\n'.join(sorted(kept)) + '\n'


def is_from_file(document):
    return document['kind'] == 'PrometheusRule' or (document['kind'] == 'ConfigMap' and '-dashboard-' in document['metadata']['name'])


def pod_templates(docs):
    """(document, pod template, number of pods)."""
    for document in docs:
        spec = document.get('spec', {})
        if document['kind'] in ('Deployment', 'StatefulSet'):
            yield document, spec['template'], spec.get('replicas')
        if document['kind'] == 'Job':
            yield document, spec['template'], 1
        if document['kind'] == 'LeaderWorkerSet':
            yield document, spec['leaderWorkerTemplate']['workerTemplate'], spec['replicas'] * spec['leaderWorkerTemplate']['size']
        if document['kind'] == 'Pod':
            yield document, document, 1


def of_kind(docs, *kinds):
    return [document for document in docs if document['kind'] in kinds]


def selects(selector, labels):
    return all(labels.get(key) == value for key, value in selector.items())


def config_of(docs):
    [config] = [document for document in of_kind(docs, 'ConfigMap') if not is_from_file(document)]
    return yaml.safe_load(config['data']['dflashd.yaml'])


def values_of(profile):
    def merged(base, over):
        return {**base, **{key: merged(base[key], value) if isinstance(value, dict) and isinstance(base.get(key), dict) else value
                           for key, value in over.items()}}
    return merged(yaml.safe_load((CHART / 'values.yaml').read_text()), yaml.safe_load((CHART / 'profiles' / (profile + '.yaml')).read_text()))


# Values, and what Helm must say about them: a path of the schema, or a sentence of the templates.
REFUSED = [
    ('groups.ranks=two', '/groups/ranks'), ('groups.ranks=9', '/groups/ranks'), ('groups.cuont=2', '/groups'), ('backend=rocm', '/backend'),
    ('replcias=2', 'replcias'), ('image.digest=sha256:12', '/image/digest'), ('engine.maxSequences=0', '/engine/maxSequences'),
    ('engine.defect=x', '/engine'), ('server.listen=0.0.0.0:1', '/server'), ('model.target=../etc', '/model/target'), ('drain.seconds=-1', '/drain/seconds'),
    ('runAsUser=0', '/runAsUser'), ('service.port=70000', '/service/port'), ('probes.liveness.exec=x', '/probes/liveness'),
    ('tls.secretName=Big_Name', '/tls/secretName'), ('sharedMemory=lots', '/sharedMemory'), ('autoscaling.kind=cpu', '/autoscaling/kind'),
    ('groups.secretName=', 'groups.secretName:'), ('replicas=2', 'replicas:'), ('groups.hosts=2', 'groups.hosts:'),
    ('mode=nodes,groups.ranks=3,groups.hosts=2', 'groups.ranks:'), ('autoscaling.kind=hpa', 'autoscaling.kind:'),
    ('mode=single,autoscaling.kind=keda', 'autoscaling.prometheusAddress:'), ('service.type=LoadBalancer', 'service.type:'),
    ('tls.clientCertificates=true', 'tls.clientCertificates:'), ('models.source=claim', 'models.claim:'), ('models.source=host', 'models.hostPath:'),
    ('networkPolicy.clients={}', '/networkPolicy/clients'), ('networkPolicy.monitoring={}', '/networkPolicy/monitoring'),
    ('models.download.enabled=true', 'models.download:'), ('models.source=create,models.download.enabled=true', 'models.download:'),
    ('models.source=create,models.download.enabled=true,models.download.image=i,models.download.target.repository=r', 'models.download.drafter.repository:'),
]


class Chart(unittest.TestCase):
    def test_lint(self):
        for version in (3, 4):
            for profile in PROFILES:
                support.run(helm(version), 'lint', '--strict', CHART, '--values', CHART / 'profiles' / (profile + '.yaml'))

    def test_renders_what_was_reviewed(self):
        for profile in PROFILES:
            for version in (3, 4):
                with self.subTest(profile=profile, helm=version):
                    self.assertEqual(reviewed(render(profile, version=version)), (GOLDEN / (profile + '.yaml')).read_text(),
                                     'look at the difference; tests/deploy/chart_test.py --update takes it')

    def test_commands_of_the_guide(self):
        """What docs/deploy.md tells people to install renders, its image in it, and the Secrets that it names are made there."""
        guide = (support.ROOT / 'docs' / 'deploy.md').read_text()
        commands = [line.split() for line in re.findall(r'^    (helm .* install .*)$', guide, re.M)]
        self.assertEqual(len(commands), 3)
        made = set(re.findall(r'create secret generic (\S+)', guide))
        for command in commands:
            for version in (3, 4):
                rendered = documents(support.run(helm(version), *('template' if word == 'install' else word for word in command[1:]), cwd=support.ROOT))
                wanted = set()
                for _, template, _ in pod_templates(rendered):
                    spec = template['spec']
                    wanted |= {volume['secret']['secretName'] for volume in spec.get('volumes', []) if 'secret' in volume}
                    for container in spec['containers'] + spec.get('initContainers', []):
                        wanted |= {entry['valueFrom']['secretKeyRef']['name'] for entry in container.get('env', []) if 'secretKeyRef' in entry.get('valueFrom', {})}
                        if '--set' in command:
                            self.assertIn('YOURS', container['image'])
                self.assertLessEqual(wanted, made, command)

    def test_packages(self):
        """A packaged chart has its dashboards and rules."""
        with tempfile.TemporaryDirectory() as folder:
            support.run(helm(3), 'package', CHART, '--destination', folder)
            [package] = pathlib.Path(folder).iterdir()
            rendered = support.run(helm(3), 'template', 'rel', package, '--namespace', 'llm', '--values', CHART / 'profiles' / 'groups.yaml')
            self.assertEqual(sum(is_from_file(document) for document in documents(rendered)), 5)

    def test_dashboards_and_rules_are_the_files(self):
        docs = documents(render('groups', '--set', 'monitoring.runbookUrl=https://wiki/books/'))
        [rule] = of_kind(docs, 'PrometheusRule')
        text = (CHART / 'rules' / 'dflashd.yaml').read_text().replace('docs/runbooks/', 'https://wiki/books/')
        self.assertEqual(rule['spec'], yaml.safe_load(text))
        boards = {document['metadata']['name'].rpartition('-dashboard-')[2]: document for document in docs if is_from_file(document) and 'data' in document}
        self.assertEqual(set(boards), {path.stem for path in (CHART / 'dashboards').glob('*.json')})
        for name, document in boards.items():
            self.assertEqual(document['metadata']['labels']['grafana_dashboard'], '1')
            text = (CHART / 'dashboards' / (name + '.json')).read_text().replace('docs/runbooks/', 'https://wiki/books/')
            self.assertEqual(json.loads(document['data']['dflashd-%s.json' % name]), json.loads(text))

    def test_refuses_wrong_values(self):
        for version in (3, 4):
            for values, said in REFUSED:
                with self.subTest(values=values, helm=version):
                    run = subprocess.run([helm(version), 'template', 'rel', CHART, '--values', CHART / 'profiles' / 'tiny.yaml', '--set', values],
                                         capture_output=True, text=True)
                    self.assertNotEqual(run.returncode, 0)
                    # Helm 3 writes a.b, Helm 4 /a/b.
                    self.assertIn(said.strip('/').replace('/', '.') if version == 3 else said, run.stderr)

    def test_values_and_schema_name_the_same(self):
        def compare(values, schema, place):
            if 'properties' not in schema:
                return
            if values == {}:  # settings that are all optional
                return
            self.assertEqual(set(values), set(schema['properties']) - {'global'}, place)
            for key, value in values.items():
                if isinstance(value, dict):
                    compare(value, schema['properties'][key], '%s.%s' % (place, key))
        compare(yaml.safe_load((CHART / 'values.yaml').read_text()), json.loads((CHART / 'values.schema.json').read_text()), 'values')

    def test_typed_schemas(self):
        tools = support.deploy_tools()
        if not (tools / 'node_modules' / 'typescript').is_dir():
            raise unittest.SkipTest('the types are not installed (tools/install-deploy-tools, which needs npm)')
        node = support.require_program('node')
        docs = [{'place': '%s: %s %s' % (profile, document['kind'], document['metadata']['name']), 'document': document}
                for profile in PROFILES for document in documents(render(profile))]
        docs += [{'place': 'hpa', 'document': document} for document in of_kind(documents(render(
            'one-gpu', '--set', 'autoscaling.kind=hpa')), 'HorizontalPodAutoscaler')]
        boards = [{'place': path.name, 'document': json.loads(path.read_text())} for path in (CHART / 'dashboards').glob('*.json')]
        self.assertEqual(self.typed_faults(node, docs, boards), [])
        # Can it fail? A wrong type, an unknown field, a missing one, an unknown kind, a field that Grafana does not know.
        for break_it, said in (
                (lambda d, b: d['spec'].update(replicas='two'), 'replicas'),
                (lambda d, b: d['spec']['template']['spec']['containers'][0].update(livenesProbe={}), 'livenesProbe'),
                (lambda d, b: d['spec'].pop('selector'), 'selector'),
                (lambda d, b: d.update(kind='Deploymint'), 'Deploymint'),
                (lambda d, b: b['templating']['list'][1].update(multy=True), 'multy')):
            document = json.loads(json.dumps(next(entry['document'] for entry in docs if entry['document']['kind'] == 'Deployment')))
            board = json.loads(json.dumps(boards[0]['document']))
            break_it(document, board)
            faults = self.typed_faults(node, [{'place': 'x', 'document': document}], [{'place': 'y', 'document': board}])
            self.assertTrue(any(said in fault for fault in faults), '%s: %s' % (said, faults))

    def typed_faults(self, node, docs, boards):
        tools = support.deploy_tools()
        with tempfile.TemporaryDirectory() as folder:
            (pathlib.Path(folder) / 'documents.json').write_text(json.dumps(docs))
            (pathlib.Path(folder) / 'dashboards.json').write_text(json.dumps(boards))
            shutil.copy(pathlib.Path(__file__).parent / 'tools' / 'check_documents.mjs', tools)
            run = subprocess.run([node, tools / 'check_documents.mjs', folder], capture_output=True, text=True)
        self.assertEqual(run.stderr, '')
        return run.stdout.splitlines()

    def each(self):
        for profile in PROFILES:
            with self.subTest(profile=profile):
                yield values_of(profile), documents(render(profile))

    def test_grace_periods_and_probes(self):
        for values, docs in self.each():
            config = config_of(docs)
            for document, template, _ in pod_templates(docs):
                for container in template['spec']['containers']:
                    probes = {name: container.get(name) for name in ('startupProbe', 'readinessProbe', 'livenessProbe')}
                    ports = {port['name'] for port in container.get('ports', [])}
                    for name, probe in probes.items():
                        if probe:
                            self.assertIn((probe.get('httpGet') or probe.get('tcpSocket'))['port'], ports, name)
                            self.assertNotIn('exec', probe)
                    if container['name'] == 'dflashd':
                        grace = template['spec']['terminationGracePeriodSeconds']
                        self.assertGreaterEqual(grace, config['drain-grace-seconds'] + config['drain-seconds'] + SHUTDOWN_SECONDS + 5)
                        self.assertEqual([probe['httpGet']['path'] for probe in probes.values()], ['/startupz', '/readyz', '/livez'])
                        ready = probes['readinessProbe']
                        # Others hear that it goes before it refuses.
                        self.assertLessEqual(ready['periodSeconds'] * ready['failureThreshold'], config['drain-grace-seconds'])
                        # A group that is lost comes back by itself: that takes longer than a liveness probe would wait, and is none
                        # of its business. It waits longer than the thread behind it is allowed to stand still (10 s).
                        live = probes['livenessProbe']
                        self.assertGreater(live['periodSeconds'] * live['failureThreshold'], 10 + live['timeoutSeconds'])
                        startup = probes['startupProbe']
                        load = values['engine'].get('loadTimeout', 600) if values['backend'] == 'cuda' else 60
                        self.assertGreater(startup['periodSeconds'] * startup['failureThreshold'], load)
                    if container['name'] == 'worker':
                        self.assertGreaterEqual(template['spec']['terminationGracePeriodSeconds'], 10 + 10)
                        self.assertIsNone(probes['livenessProbe'])

    def test_budgets_never_block_a_drain(self):
        for values, docs in self.each():
            templates = list(pod_templates(docs))
            for budget in of_kind(docs, 'PodDisruptionBudget'):
                self.assertNotIn('minAvailable', budget['spec'])
                self.assertGreaterEqual(budget['spec']['maxUnavailable'], 1)
                chosen = [document['kind'] for document, template, _ in templates
                          if selects(budget['spec']['selector']['matchLabels'], template['metadata']['labels'])]
                self.assertEqual(len(chosen), 1, budget['metadata']['name'])
            covered = len(of_kind(docs, 'PodDisruptionBudget'))
            self.assertEqual(covered, len(of_kind(docs, 'Deployment', 'StatefulSet', 'LeaderWorkerSet')))

    def test_selectors_and_ports_meet(self):
        for values, docs in self.each():
            templates = list(pod_templates(docs))
            for document, template, _ in templates:
                selector = document.get('spec', {}).get('selector')
                if selector:
                    self.assertTrue(selects(selector['matchLabels'], template['metadata']['labels']))
            for service in of_kind(docs, 'Service'):
                chosen = [template for _, template, _ in templates if selects(service['spec']['selector'], template['metadata']['labels'])]
                self.assertEqual(len(chosen), 1, service['metadata']['name'])
                ports = {port['name'] for port in chosen[0]['spec']['containers'][0]['ports']}
                for port in service['spec']['ports']:
                    self.assertIn(port['targetPort'], ports)
            for policy in of_kind(docs, 'NetworkPolicy'):
                chosen = [template for _, template, _ in templates if selects(policy['spec']['podSelector']['matchLabels'], template['metadata']['labels'])]
                self.assertEqual(len(chosen), 1, policy['metadata']['name'])
                ports = {port['name'] for port in chosen[0]['spec']['containers'][0]['ports']}
                for rule in policy['spec']['ingress']:
                    for port in rule.get('ports', []):
                        self.assertIn(port['port'], ports)
            for monitor in of_kind(docs, 'ServiceMonitor'):
                chosen = [service for service in of_kind(docs, 'Service') if selects(monitor['spec']['selector']['matchLabels'], service['metadata']['labels'])]
                self.assertEqual([service['metadata']['name'] for service in chosen], ['rel-dflashd-headless'])
                self.assertIn(monitor['spec']['endpoints'][0]['port'], {port['name'] for port in chosen[0]['spec']['ports']})

    def test_the_coordinator_finds_every_group(self):
        for values, docs in self.each():
            config = config_of(docs)
            if values['mode'] == 'single':
                self.assertNotIn('connect', config)
                self.assertEqual((config['groups'], config['tp']), (values['groups']['count'], values['groups']['ranks']))
                continue
            [workers] = of_kind(docs, 'StatefulSet', 'LeaderWorkerSet')
            name = workers['metadata']['name']
            service = workers['spec'].get('serviceName', name)  # a LeaderWorkerSet makes one of its own name
            wanted = ['%s-%d.%s.llm.svc:8502' % (name, i, service) for i in range(values['groups']['count'])]
            self.assertEqual(config['connect'].split(','), wanted)
            if workers['kind'] == 'StatefulSet':
                [headless] = [s for s in of_kind(docs, 'Service') if s['metadata']['name'] == service]
                self.assertEqual(headless['spec']['clusterIP'], 'None')
                self.assertTrue(headless['spec']['publishNotReadyAddresses'])

    def test_gpus(self):
        for values, docs in self.each():
            pods_of_a_group = values['groups']['hosts']
            gpus = 0
            for document, template, pods in pod_templates(docs):
                for container in template['spec']['containers']:
                    limits, requests = container['resources']['limits'], container['resources']['requests']
                    count = limits.get('nvidia.com/gpu', 0)
                    self.assertEqual(count, requests.get('nvidia.com/gpu', 0))
                    self.assertLessEqual(set(limits) - {'cpu'}, set(requests))
                    gpus += count * (pods or values['replicas'])
                if any(container['resources']['limits'].get('nvidia.com/gpu') for container in template['spec']['containers']):
                    self.assertIn({'key': 'nvidia.com/gpu', 'operator': 'Exists', 'effect': 'NoSchedule'}, template['spec']['tolerations'])
            ranks = values['groups']['count'] * values['groups']['ranks'] * values['replicas']
            self.assertEqual(gpus, ranks if values['backend'] == 'cuda' else 0)
            self.assertEqual(values['groups']['ranks'] % pods_of_a_group, 0)

    def test_least_privilege(self):
        for values, docs in self.each():
            self.assertEqual(of_kind(docs, 'Secret', 'Role', 'ClusterRole', 'RoleBinding', 'ClusterRoleBinding'), [])
            for document, template, _ in pod_templates(docs):
                spec = template['spec']
                self.assertIs(spec['automountServiceAccountToken'], False)
                self.assertIs(spec['securityContext']['runAsNonRoot'], True)
                self.assertEqual(spec['securityContext']['seccompProfile'], {'type': 'RuntimeDefault'})
                for key in ('hostNetwork', 'hostPID', 'hostIPC'):
                    self.assertNotIn(key, spec)
                for container in spec['containers'] + spec.get('initContainers', []):
                    security = container['securityContext']
                    self.assertIs(security['allowPrivilegeEscalation'], False)
                    self.assertIs(security['readOnlyRootFilesystem'], True)
                    self.assertEqual(security['capabilities']['drop'], ['ALL'])
                    added = security['capabilities'].get('add', [])
                    self.assertEqual(added, ['IPC_LOCK'] if values['network']['resources'] and container['name'] == 'worker' else [])
                    self.assertNotIn('privileged', security)
                    self.assertIn('memory', container['resources']['limits'])
                    for variable in container.get('env', []):
                        if re.search('TOKEN|SECRET|KEY', variable['name']):
                            self.assertNotIn('value', variable)
                    for mount in container.get('volumeMounts', []):
                        writable = not mount.get('readOnly', False)
                        self.assertIn(mount['mountPath'], ('/tmp', '/dev/shm', '/models') if document['kind'] == 'Job' else
                                      ('/tmp', '/dev/shm') if writable else (mount['mountPath'],))

    def test_the_programs_take_their_command_lines(self):
        """dflashd reads the rendered configuration; dflash-worker knows every flag; every setting of the schema is one."""
        for values, docs in self.each():
            with tempfile.TemporaryDirectory() as folder:
                file = pathlib.Path(folder) / 'dflashd.yaml'
                [config] = [document for document in of_kind(docs, 'ConfigMap') if not is_from_file(document)]
                file.write_text(config['data']['dflashd.yaml'])
                shown = yaml.safe_load(support.run(support.built('dflashd'), '--config=%s' % file, '--print-config'))
                for key, value in yaml.safe_load(file.read_text()).items():
                    self.assertEqual(str(shown[key]).lower(), str(value).lower(), key)
            for document, template, _ in pod_templates(docs):
                for container in template['spec']['containers']:
                    if container['name'] == 'worker':
                        flags = [flag.replace('$(LWS_WORKER_INDEX)', '1') for flag in container['args']]
                        support.run(support.built('dflash-worker'), *flags, '--help')
        schema = json.loads((CHART / 'values.schema.json').read_text())['properties']
        known = set()
        dflashd = support.run(support.built('dflashd'), '--help')
        worker = support.run(support.built('dflash-worker'), '--help')
        for part, programs in (('server', [dflashd]), ('engine', [dflashd, worker])):
            for key in schema[part]['properties']:
                flag = '--' + re.sub(r'([A-Z])', lambda found: '-' + found.group(1).lower(), key)
                known.add(flag)
                for text in programs:
                    self.assertRegex(text, r'(?m)^  %s ' % flag)
        # And every flag is a setting, but for those that the chart sets by itself or that make no sense in a pod.
        others = set('config print-config help model draft-model model-name listen ops-listen admin-listen tls-cert tls-key tls-client-ca '
                     'token-file open-metrics drain-grace-seconds drain-seconds tp groups connect group-secret-file share-device '
                     'backend worker allow-unlisted-config-keys inject-defect'.split())
        self.assertEqual(set(re.findall(r'(?m)^  (--[a-z0-9-]+)', dflashd)) - known, {'--' + flag for flag in others})

    def test_download(self):
        """A Job cannot be changed: one that differs has another name. A volume of one node is written where the server reads it."""
        def job(*flags):
            rendered = documents(support.run(helm(3), 'template', 'dflashd', CHART, '--values', CHART / 'profiles' / 'one-gpu.yaml', *flags))
            [found] = of_kind(rendered, 'Job')
            return found
        first = job()
        self.assertEqual(job()['metadata']['name'], first['metadata']['name'])
        names = {first['metadata']['name']}
        for change in ('image.pullPolicy=Always', 'runAsUser=1000', 'priorityClassName=high', 'models.path=/m', 'nodeSelector.a=b',
                       'models.download.target.revision=r2', 'image.pullSecrets={s}'):
            names.add(job('--set', change)['metadata']['name'])
        self.assertEqual(len(names), 8)
        pod = first['spec']['template']['spec']
        [term] = pod['affinity']['podAffinity']['requiredDuringSchedulingIgnoredDuringExecution']
        [server] = [template for document, template, _ in pod_templates(documents(support.run(
            helm(3), 'template', 'dflashd', CHART, '--values', CHART / 'profiles' / 'one-gpu.yaml'))) if document['kind'] == 'Deployment']
        self.assertLessEqual(term['labelSelector']['matchLabels'].items(), server['metadata']['labels'].items())
        self.assertEqual(pod['tolerations'], server['spec']['tolerations'])
        elsewhere = job('--set', 'models.create.accessMode=ReadWriteMany')['spec']['template']['spec']
        self.assertNotIn('affinity', elsewhere)


if __name__ == '__main__':
    if sys.argv[1:] == ['--update']:
        GOLDEN.mkdir(exist_ok=True)
        for profile in PROFILES:
            (GOLDEN / (profile + '.yaml')).write_text(reviewed(render(profile)))
        sys.exit(0)
    support.main()
