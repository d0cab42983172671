#!/usr/bin/python3
"""systemd units and the compose file, as far as they can be checked without starting them."""
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

sys.dont_write_bytecode = True
import yaml

import support

DEPLOY = support.ROOT / 'deploy'
DRAIN_DEFAULTS = 120  # daemon/settings.h


class Units(unittest.TestCase):
    def test_systemd_understands_them(self):
        analyze = support.require_program('systemd-analyze', 'package systemd')
        for unit in sorted((DEPLOY / 'systemd').glob('*.service')):
            with tempfile.TemporaryDirectory() as folder:
                # Only the program is not there.
                copy = pathlib.Path(folder) / unit.name
                copy.write_text(re.sub(r'/opt/dflashd/\S+', '/bin/true', unit.read_text()).replace('[Install]', '[Install]'))
                run = subprocess.run([analyze, 'verify', '--man=no', copy], capture_output=True, text=True)
                said = [line for line in (run.stdout + run.stderr).splitlines() if unit.name in line]
                self.assertEqual(said, [])
                self.assertEqual(run.returncode, 0, run.stderr)

    def test_exposure(self):
        """systemd's own measure, from 0 (nothing allowed) to 10; 4 and less is called OK."""
        analyze = support.require_program('systemd-analyze', 'package systemd')
        for unit in sorted((DEPLOY / 'systemd').glob('*.service')):
            run = subprocess.run([analyze, 'security', '--offline=true', '--threshold=25', '--no-pager', unit], capture_output=True, text=True)
            if 'unrecognized option' in run.stderr:
                raise unittest.SkipTest('systemd is too old to look at a file')
            self.assertEqual(run.returncode, 0, run.stdout[-3000:] + run.stderr)

    def test_time_to_stop(self):
        text = (DEPLOY / 'systemd' / 'dflashd.service').read_text()
        self.assertGreaterEqual(int(re.search(r'TimeoutStopSec=(\d+)', text).group(1)), DRAIN_DEFAULTS + 2 + 10 + 5)


class Compose(unittest.TestCase):
    def setUp(self):
        self.compose = yaml.safe_load((DEPLOY / 'compose' / 'compose.yaml').read_text())

    def test_everything_that_is_mounted_is_there(self):
        for name, what in self.compose['services'].items():
            self.assertIn('no-new-privileges:true', what['security_opt'], name)
            self.assertEqual(what['cap_drop'], ['ALL'], name)
            for volume in what.get('volumes', []):
                source = volume.split(':')[0]
                if source.startswith('.'):
                    self.assertTrue((DEPLOY / 'compose' / source).exists(), volume)
                else:
                    self.assertIn(source, self.compose['volumes'])
            for port in what['ports']:
                self.assertTrue(port.startswith('127.0.0.1:'), port)

    def test_prometheus_finds_the_server_and_the_rules(self):
        promtool = support.require_program('promtool', 'package prometheus')
        with tempfile.TemporaryDirectory(dir=support.memory_folder()) as folder:
            text = (DEPLOY / 'compose' / 'prometheus.yml').read_text()
            mounted = {volume.split(':')[1]: volume.split(':')[0] for volume in self.compose['services']['prometheus']['volumes']}
            self.assertIn('/etc/prometheus/rules', mounted)
            text = text.replace('/etc/prometheus/rules', str((DEPLOY / 'compose' / mounted['/etc/prometheus/rules']).resolve()))
            file = pathlib.Path(folder) / 'prometheus.yml'
            file.write_text(text)
            said = support.run(promtool, 'check', 'config', file)
            self.assertIn('rules found', said)
            [target] = yaml.safe_load(text)['scrape_configs'][0]['static_configs'][0]['targets']
            self.assertEqual(target, 'dflashd:8503')

    def test_grafana_finds_prometheus_and_the_dashboards(self):
        grafana = self.compose['services']['grafana']
        mounted = {volume.split(':')[1]: volume.split(':')[0] for volume in grafana['volumes']}
        [provider] = yaml.safe_load((DEPLOY / 'compose/grafana/provisioning/dashboards/dflashd.yaml').read_text())['providers']
        folder = DEPLOY / 'compose' / mounted[provider['options']['path']]
        self.assertEqual(len(list(folder.glob('*.json'))), 4)
        home = pathlib.Path(grafana['environment']['GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH'])
        self.assertTrue((folder / home.name).is_file())
        [source] = yaml.safe_load((DEPLOY / 'compose/grafana/provisioning/datasources/prometheus.yaml').read_text())['datasources']
        self.assertEqual(source['url'], 'http://prometheus:9090')

    def test_grace(self):
        self.assertGreaterEqual(int(self.compose['services']['dflashd']['stop_grace_period'].rstrip('s')), DRAIN_DEFAULTS + 2 + 10 + 5)


if __name__ == '__main__':
    support.main()
