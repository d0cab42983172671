#!/usr/bin/python3
"""Dashboards and alerts against the truth: a real Prometheus scrapes a real dflashd under load. Every query of every panel returns
data, every metric that dashboards, rules or documents name is on the page, and every metric on the page is named by one of them."""
import contextlib
import json
import math
import os
import pathlib
import re
import signal
import sys
import tempfile
import time
import unittest

sys.dont_write_bytecode = True
import yaml

import service
import support

CHART = support.ROOT / 'helm' / 'dflashd'
VARIABLES = {'$__rate_interval': '15s', '$__interval': '5s', '$model': '.*', '$instance': '.*', '$group': '.*'}

# Metrics that no dashboard and no alert needs, and that a page may lack, with the reason. There are none.
NOT_SHOWN = {}

DCGM = ''.join('# TYPE %s gauge\n%s{gpu="0",Hostname="node-a"} %d\n' % (name, name, value) for name, value in
               (('DCGM_FI_DEV_GPU_UTIL', 87), ('DCGM_FI_DEV_FB_USED', 68000), ('DCGM_FI_DEV_POWER_USAGE', 510)))


def dashboards():
    return {path.stem: json.loads(path.read_text()) for path in sorted((CHART / 'dashboards').glob('*.json'))}


def panels(dashboard):
    return [panel for panel in dashboard['panels'] if panel['type'] != 'row']


def expressions():
    """(dashboard, panel, query, whether it wants an instant)."""
    for name, dashboard in dashboards().items():
        for panel in panels(dashboard):
            for target in panel['targets']:
                yield name, panel['title'], target['expr'], target.get('instant', False)


def substituted(expression):
    for name in sorted(VARIABLES, key=len, reverse=True):
        expression = expression.replace(name, VARIABLES[name])
    assert not re.search(r'\$[a-z_]', expression), expression
    return expression


def table():
    """The names of base/metric_names.h."""
    return set(re.findall(r'"(dflashd_[a-z0-9_]+)"', (support.ROOT / 'base' / 'metric_names.h').read_text()))


def metric_names_in(text):
    known = table()
    names = set()
    for name in re.findall(r'\bdflashd_[a-z0-9_]*[a-z0-9]\b(?!_|\*)', text):
        base = re.sub(r'_(bucket|sum|count)$', '', name)
        names.add(name if name in known else base)
    return names


class Static(unittest.TestCase):
    """What needs no server."""

    def test_generated(self):
        support.run(support.ROOT / 'dashboards' / 'generate', '--check')

    def test_every_panel_says_what_it_shows(self):
        identities = set()
        for name, dashboard in dashboards().items():
            self.assertEqual(dashboard['uid'], 'dflashd-' + name)
            self.assertEqual({variable['name'] for variable in dashboard['templating']['list']},
                             {'datasource', 'model', 'instance', 'group'})
            ids = [panel['id'] for panel in dashboard['panels']]
            self.assertEqual(len(ids), len(set(ids)), name)
            for panel in panels(dashboard):
                place = '%s: %s' % (name, panel['title'])
                identities.add((name, panel['title']))
                self.assertGreater(len(panel['description']), 10, place)
                defaults = panel['fieldConfig']['defaults']
                self.assertTrue(defaults['unit'], place)
                self.assertTrue(defaults['thresholds']['steps'], place)
                self.assertTrue(panel['links'], place)
                self.assertTrue(panel['targets'], place)
                for link in panel['links']:
                    if link['url'].startswith('docs/'):
                        self.assertTrue((support.ROOT / link['url']).is_file(), '%s: %s' % (place, link['url']))
                    else:
                        self.assertIn(re.match(r'/d/dflashd-(\w+)\?', link['url']).group(1), dashboards(), place)
        self.assertEqual(len(identities), sum(len(panels(dashboard)) for dashboard in dashboards().values()))

    def test_panels_do_not_overlap(self):
        for name, dashboard in dashboards().items():
            taken = {}
            for panel in dashboard['panels']:
                grid = panel['gridPos']
                self.assertLessEqual(grid['x'] + grid['w'], 24, name)
                for x in range(grid['x'], grid['x'] + grid['w']):
                    for y in range(grid['y'], grid['y'] + grid['h']):
                        self.assertNotIn((x, y), taken, '%s: %s lies over %s' % (name, panel['title'], taken.get((x, y))))
                        taken[x, y] = panel['title']

    def test_metrics_exist_and_are_used(self):
        rules = (CHART / 'rules' / 'dflashd.yaml').read_text()
        shown = metric_names_in(rules + ' '.join(expression for _, _, expression, _ in expressions()))
        documents = {path: metric_names_in(path.read_text()) for folder in ('docs', 'dashboards', 'helm', 'deploy')
                     for path in (support.ROOT / folder).rglob('*') if path.suffix in ('.md', '.yaml', '.yml', '.tpl')}
        documents[support.ROOT / 'README.md'] = metric_names_in((support.ROOT / 'README.md').read_text())
        known = table()
        self.assertGreater(len(known), 40)
        for path, names in documents.items():
            self.assertEqual(names - known, set(), '%s names metrics that are not there' % path.name)
        self.assertEqual(shown - known, set(), 'dashboards or rules name metrics that are not there')
        self.assertEqual(known - shown - set(NOT_SHOWN), set(), 'metrics that nothing shows: give them a panel, or a reason in NOT_SHOWN')

    def test_recorded_series_exist(self):
        groups = yaml.safe_load((CHART / 'rules' / 'dflashd.yaml').read_text())['groups']
        records = {rule['record'] for group in groups for rule in group['rules'] if 'record' in rule}
        used = {name for text in [str(groups)] + [expression for _, _, expression, _ in expressions()]
                for name in re.findall(r'\bdflashd:[a-z0-9_:]+', text)}
        self.assertEqual(used, records)


class UnderLoad(unittest.TestCase):
    def setUp(self):
        support.require_program('prometheus')
        support.require_program('openssl')
        self.folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory(prefix='dflashd-', dir=support.memory_folder())))

    def test_every_panel_has_data(self):
        certificate, key = service.make_certificate(self.folder)
        # Few pages and places, so that requests are preempted and refused.
        server = self.enterContext(service.Dflashd(
            '--groups', 2, '--threads', 1, '--max-sequences', 4, '--cache-tokens', 1024, '--max-queued-requests', 6, '--tls-cert', certificate,
            '--tls-key', key, '--max-restart-delay', 1, '--otlp-endpoint', 'http://127.0.0.1:9', certificate=certificate))
        gpus = self.enterContext(service.page(DCGM))
        prometheus = self.enterContext(service.Prometheus(self.folder / 'prometheus', {'dflashd': server.ops, 'dcgm': gpus}))
        begin = time.time()
        with server.bench('--clients', 24, '--seconds', 900, '--ignore-eos', '--output-tokens', 300) as busy, \
                server.bench('--clients', 1, '--seconds', 900, '--speculation', 'off') as plain:
            service.wait_until(lambda: prometheus.value('sum(dflashd_preemptions_total)'), 'a preemption')
            service.wait_until(lambda: prometheus.value('sum(dflashd_requests_rejected_total{reason="queue_full"})'), 'a refusal')
            victims = service.children_of(server.process.pid, 'dflash-worker')
            self.assertEqual(len(victims), 2)
            os.kill(victims[1], signal.SIGKILL)
            service.wait_until(lambda: prometheus.value('sum(dflashd_group_state{state="ready"})') == 2
                               and prometheus.value('max(dflashd_group_epoch)') == 2, 'a group that has come back')
            missing = list(expressions())

            def has_data(query, instant):
                result = prometheus.query(query) if instant else prometheus.query_range(query, begin, time.time(), 1)
                samples = [float(sample[1]) for series in result for sample in series.get('values', [series.get('value')])]
                return any(math.isfinite(sample) for sample in samples)

            def nothing_is_missing():
                missing[:] = [entry for entry in missing if not has_data(substituted(entry[2]), entry[3])]
                return not missing
            try:
                service.wait_until(nothing_is_missing, 'data for every query')
            except AssertionError:
                self.fail('queries without data:\n' + '\n'.join('%s: %s: %s' % entry[:3] for entry in missing))
            for load in (busy, plain):
                load.end(signal.SIGKILL)
        end = time.time()
        self.assertGreater(prometheus.value('sum(dflashd_spec_decode_num_accepted_tokens_total)'), 100)
        for dashboard in dashboards().values():
            for annotation in dashboard['annotations']['list']:
                result = prometheus.query_range(re.sub(r'\[1m\]', '[15s]', substituted(annotation['expr'])), begin, end, 1)
                self.assertTrue(result, 'the group that was killed leaves no annotation')
            for variable in dashboard['templating']['list']:
                if variable['type'] == 'query':
                    series, label = re.fullmatch(r'label_values\((.+), (\w+)\)', variable['query']['query']).groups()
                    self.assertTrue(prometheus.query('count by (%s) (%s)' % (label, substituted(series))), variable)

        on_page = set(re.findall(r'^# TYPE (\S+)', server.metrics(), re.M))
        self.assertEqual(on_page - table(), set())
        self.assertEqual(table() - on_page - set(NOT_SHOWN), set(), 'metrics that the page lacks')

    def test_alert_on_a_planted_defect(self):
        """The acceptance alerts stay silent on a sound pair, fire on one whose drafter reads the wrong layers, name their runbook,
        and resolve when the sound pair is back."""
        rules = service.hurried_rules(CHART / 'rules' / 'dflashd.yaml', self.folder / 'rules.yaml')
        ops = '127.0.0.1:%d' % service.free_port()
        prometheus = self.enterContext(service.Prometheus(self.folder / 'prometheus', {'dflashd': ops}, [rules]))

        def firing():
            return {alert['labels']['alertname']: alert for alert in prometheus.api('alerts')['alerts'] if alert['state'] == 'firing'}

        def run(drafter, kinds, until, what):
            # Left to itself the scheduler soon stops drafting what is never accepted.
            with contextlib.ExitStack() as stack:
                server = stack.enter_context(service.Dflashd('--threads', 1, '--block-length', 'whole', ops=ops, drafter=drafter))
                loads = [stack.enter_context(server.bench('--clients', clients, '--seconds', 900, kind=kind)) for kind, clients in kinds.items()]
                service.wait_until(lambda: prometheus.value('sum(dflashd:rounds:rate5m)'), 'rounds')
                result = service.wait_until(until, what)
                length = prometheus.value('1 + sum(dflashd_spec_decode_num_accepted_tokens_total) / sum(dflashd_spec_decode_num_drafts_total)')
                for load in loads:
                    load.end(signal.SIGKILL)
                return result, length

        ACCEPTANCE = {'DflashdAcceptanceCollapsed': 'acceptance', 'DflashdFirstDraftRejected': 'acceptance', 'DflashdDrafterBroken': 'broken-drafter'}
        waited = time.monotonic() + 25

        def silent_for_long():
            self.assertEqual(set(firing()) & set(ACCEPTANCE), set())
            return time.monotonic() > waited
        _, length = run(service.DRAFTER, {'chat': 1}, silent_for_long, 'longer than the alerts wait')
        self.assertGreater(length, 5)
        alerts, length = run(service.broken_drafter(self.folder / 'broken'), {'chat': 1, 'code': 2},
                             lambda: set(firing()) >= set(ACCEPTANCE) and firing(), 'the alerts')
        self.assertLess(length, 2)
        for name, runbook in ACCEPTANCE.items():
            self.assertEqual(alerts[name]['annotations']['runbook_url'], 'docs/runbooks/%s.md' % runbook)
        self.assertIn(alerts['DflashdDrafterBroken']['labels']['reason'], ('confident_and_rejected', 'prefix_hits_differ'))
        run(service.DRAFTER, {'chat': 1}, lambda: not set(firing()) & set(ACCEPTANCE), 'their end')


if __name__ == '__main__':
    support.main()
