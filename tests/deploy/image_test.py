#!/usr/bin/python3
"""The CPU image, built by buildah from what is compiled, and started: as any user, with a read-only root; it answers a gRPC client and
drains. And the containers of the chart's tiny profile, started in that image with the command lines, users, volumes and names that the
chart gives them: they form a service. Needs root; everything runs in a network of its own that has nothing but loopback."""
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest

sys.dont_write_bytecode = True
import yaml

import chart_test
import client
import files_test
import pods
import service
import support

MAX_MEGABYTES = 120


class Image(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        if os.geteuid() != 0:
            raise unittest.SkipTest('needs root to make containers')
        buildah = support.require_program('buildah')
        cls.folder = pathlib.Path(tempfile.mkdtemp(prefix='dflashd-image-', dir=support.memory_folder(1e9) or support.ROOT / 'build'))
        cls.addClassCleanup(shutil.rmtree, cls.folder, ignore_errors=True)
        rootfs = cls.folder / 'made' / 'rootfs'
        rootfs.parent.mkdir()
        support.run(support.ROOT / 'deploy' / 'make-rootfs', 'cpu', rootfs, *map(support.built, ('dflashd', 'dflash-worker', 'dflashctl')))

        def build(*command):
            return support.run(buildah, '--root', cls.folder / 'storage', '--runroot', cls.folder / 'run', '--storage-driver', 'vfs',
                               *command, env={**os.environ, 'BUILDAH_ISOLATION': 'chroot', 'TMPDIR': str(cls.folder)}).strip()
        made = build('from', '--name', 'made', 'scratch')
        build('copy', '--quiet', made, cls.folder / 'made', '/')
        build('commit', '--quiet', made, 'localhost/made')
        empty = cls.folder / 'context'
        empty.mkdir()
        # Only the stages of the target that do not compile.
        text = (support.ROOT / 'deploy' / 'Containerfile').read_text()
        build('bud', '--quiet', '--format', 'docker', '--file', support.ROOT / 'deploy' / 'Containerfile', '--target', 'cpu',
              '--build-arg', 'ROOTFS=localhost/made', '--build-arg', 'BUILDER=localhost/made', '--tag', 'localhost/dflashd', empty)
        cls.config = json.loads(build('inspect', '--type', 'image', 'localhost/dflashd'))['Docker']['config']
        work = build('from', '--name', 'work', 'localhost/dflashd')
        cls.rootfs = pathlib.Path(build('mount', work))

    def scratch(self):
        return pathlib.Path(tempfile.mkdtemp(dir=self.folder))

    def test_what_it_says_about_itself(self):
        config = self.config
        self.assertEqual(config['User'], '65532:65532')
        self.assertEqual(config['Entrypoint'], ['/opt/dflashd/dflashd'])
        self.assertEqual(config['Healthcheck']['Test'][:2], ['CMD', '/opt/dflashd/dflashctl'])
        self.assertEqual(set(config['ExposedPorts']), {'8500/tcp', '8503/tcp'})
        for label in ('title', 'description', 'licenses', 'version'):
            self.assertTrue(config['Labels']['org.opencontainers.image.' + label])

    def test_what_is_in_it(self):
        size = sum(path.stat().st_size for path in self.rootfs.rglob('*') if path.is_file() and not path.is_symlink()) / 1e6
        print('image: %.1f MB, of which models %.1f MB' % (size, sum(
            path.stat().st_size for path in (self.rootfs / 'models').rglob('*') if path.is_file()) / 1e6))
        self.assertLess(size, MAX_MEGABYTES)
        self.assertFalse((self.rootfs / 'bin').exists(), 'there is no shell to be used')
        packages = (self.rootfs / 'usr/share/doc/dflashd/packages.tsv').read_text()
        for name in ('libc6', 'libgrpc', 'libprotobuf', 'libssl3'):
            self.assertIn(name, packages)
        scanned = (self.rootfs / 'var/lib/dpkg/status.d').iterdir()
        self.assertEqual(len(list(scanned)), len(packages.splitlines()))
        for path in self.rootfs.rglob('*'):
            self.assertFalse(path.is_file() and not path.is_symlink() and path.stat().st_mode & 0o6000, '%s is setuid' % path)

    def container(self, uid, gid, args):
        spec = {'name': 'image', 'args': args, 'securityContext': {'runAsUser': uid, 'runAsGroup': gid, 'readOnlyRootFilesystem': True},
                'volumeMounts': [{'name': 'tmp', 'mountPath': '/tmp'}]}
        return pods.Container(self.rootfs, self.scratch(), spec, {}, {'tmp': None}, default_command=self.config['Entrypoint'])

    def test_runs_as_anybody_and_drains(self):
        # Left to itself the scheduler may find that plain decoding is faster, on a machine that is busy.
        with self.container(12345, 0, [*self.config['Cmd'], '--block-length', 'whole']) as daemon:
            daemon.wait_for_line('dflashd: ready')
            self.assertEqual(daemon.status('Uid'), ['12345'] * 4)
            self.assertEqual(int(daemon.status('CapEff')[0], 16), 0)
            self.assertEqual(daemon.status('NoNewPrivs'), ['1'])
            self.assertEqual(daemon.options_of_root()[0], 'ro')
            # The image's own health check, from inside.
            inside = ['nsenter', '--target', daemon.pid(), '--mount', '--pid', '--root', '--setuid', 12345, '--setgid', 0]
            self.assertRegex(support.run(*inside, *self.config['Healthcheck']['Test'][1:]), r'serving +yes')
            [golden, *_] = json.loads(service.GOLDEN.read_text())
            with client.connected('127.0.0.1:8500', self.scratch()) as peer:
                ids, finished = client.output_of(peer.generate(golden['prompt_ids'], 200))
                self.assertEqual(ids, golden['output_ids'])
                self.assertGreater(finished.speculation.accepted_tokens, finished.speculation.rounds)
                # A request that runs when the server is asked to end comes to its own end.
                running = peer.generate(golden['prompt_ids'], 1500, speculation=False, ignore_eos=True)
                self.assertEqual(next(running).WhichOneof('event'), 'started')
                began = time.monotonic()
                os.kill(daemon.pid(), signal.SIGTERM)
                daemon.wait_for_line('draining')
                ids, finished = client.output_of(running)
                self.assertEqual(len(ids), 1500)
                self.assertEqual(finished.reason, peer.messages.FINISH_REASON_LENGTH)
            self.assertEqual(daemon.process.wait(service.PATIENCE), 0, daemon.output()[-4000:])
            self.assertLess(time.monotonic() - began, files_test.DRAIN_DEFAULTS + chart_test.SHUTDOWN_SECONDS)

    def test_the_tiny_profile_is_a_service(self):
        docs = chart_test.documents(chart_test.render('tiny'))
        secret, config = self.scratch(), self.scratch()
        (secret / 'secret').write_text('a secret of at least 16 bytes')
        os.chown(secret / 'secret', 0, 65532)
        os.chmod(secret / 'secret', 0o440)
        os.chmod(secret, 0o755)
        [config_map] = [document for document in docs if document['kind'] == 'ConfigMap']
        for name, text in config_map['data'].items():
            (config / name).write_text(text)
        os.chmod(config, 0o755)
        files = {'tmp': None, 'shared-memory': None, 'group-secret': secret, 'config': config}
        # Names that the cluster's DNS would have: of services, and of pods behind a headless one.
        hosts = []
        for document in docs:
            name = document['metadata']['name']
            if document['kind'] == 'Service':
                hosts.append(name + '.llm.svc')
            if document['kind'] == 'StatefulSet':
                hosts += ['%s-%d.%s.llm.svc' % (name, i, document['spec']['serviceName']) for i in range(document['spec']['replicas'])]

        def start(spec):
            [container] = spec['containers']
            return pods.Container(self.rootfs, self.scratch(), container, spec['securityContext'], files, hosts)
        specs = {document['kind']: template['spec'] for document, template, _ in chart_test.pod_templates(docs)}
        with start(specs['Deployment']) as coordinator:
            coordinator.wait_for_line('listening')
            self.assertFalse(pods.probe(coordinator, 'startupProbe'), 'it has no group yet')
            self.assertFalse(pods.probe(coordinator, 'readinessProbe'))
            self.assertTrue(pods.probe(coordinator, 'livenessProbe'), 'waiting for a group is no reason to be killed')
            with start(specs['StatefulSet']) as worker:
                for container in (worker, coordinator):
                    pods.await_probe(container, 'startupProbe')
                    self.assertTrue(pods.probe(container, 'readinessProbe'))
                self.assertEqual(worker.status('Uid'), ['65532'] * 4)
                # The hook of helm test.
                with start(specs['Pod']) as test:
                    self.assertEqual(test.process.wait(60), 0, test.output())
                    self.assertIn('tokens per round', test.output())
                metrics = service.get('http://127.0.0.1:8503/metrics')
                self.assertIn('dflashd_group_state{state="ready",model="tiny-qwen3.6",group="0"} 1', metrics)
                self.assertIn('dflashd_group_epoch{model="tiny-qwen3.6",group="0"} 1', metrics)
                # The coordinator ends within its grace period, and the group serves the next one.
                began = time.monotonic()
                self.assertEqual(coordinator.end(), 0, coordinator.output()[-4000:])
                self.assertLess(time.monotonic() - began, specs['Deployment']['terminationGracePeriodSeconds'])
                with start(specs['Deployment']) as successor:
                    pods.await_probe(successor, 'startupProbe')
                    began = time.monotonic()
                    self.assertEqual(worker.end(), 0, worker.output()[-4000:])
                    self.assertLess(time.monotonic() - began, specs['StatefulSet']['terminationGracePeriodSeconds'])
                    service.wait_until(lambda: not pods.probe(successor, 'readinessProbe'), 'a server without group that says so')
                    self.assertTrue(pods.probe(successor, 'livenessProbe'))


if __name__ == '__main__':
    # In a network and a mount space of its own, where ports are free and nothing stays behind.
    if os.geteuid() == 0 and os.environ.get('DFLASHD_OWN_NETWORK') != 'yes':
        os.environ['DFLASHD_OWN_NETWORK'] = 'yes'
        if subprocess.run(['unshare', '--net', '--mount', '--pid', '--fork', 'true']).returncode != 0:
            print('SKIPPED: this machine makes no namespaces')
            sys.exit(support.SKIPPED)
        os.execvp('unshare', ['unshare', '--net', '--mount', '--pid', '--fork', '--kill-child', '--mount-proc', sys.executable, *sys.argv])
    if os.geteuid() == 0:
        subprocess.run([support.require_program('ip'), 'link', 'set', 'lo', 'up'], check=True)
    support.main()
