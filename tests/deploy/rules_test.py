#!/usr/bin/python3
"""promtool checks and unit-tests helm/dflashd/rules: every alert fires on what it is for and not before its time, does not fire
on a sound system, and resolves; every recording rule has a value computed by hand. Every alert names a runbook that names it."""
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

sys.dont_write_bytecode = True
import yaml

import support

RULES = support.ROOT / 'helm' / 'dflashd' / 'rules' / 'dflashd.yaml'
# All cases run beside each other in one test, told apart by `job`, since promtool takes most of a second to begin a test.
SERVER = 'namespace="llm",job="CASE",instance="a:8503",model="m"'
GROUP = SERVER + ',group="0"'


def counter(name, labels, per_minute, scope=GROUP):
    return ('dflashd_%s{%s}' % (name, ','.join(filter(None, (scope, labels)))), ('rate', per_minute))


def gauge(name, labels, value, scope=GROUP):
    return ('dflashd_%s{%s}' % (name, ','.join(filter(None, (scope, labels)))), ('value', value))


def rounds(per_minute, accepted, first=1.0, draft=0.1, verify=0.9):
    """Rounds with so many accepted drafts each, a share of accepted first drafts, and the seconds of a minute."""
    method = 'method="dflash"'
    return [counter('spec_decode_num_drafts_total', method, per_minute),
            counter('spec_decode_num_accepted_tokens_total', method, per_minute * accepted),
            counter('spec_decode_num_draft_tokens_per_pos_total', method + ',position="0"', per_minute),
            counter('spec_decode_num_accepted_tokens_per_pos_total', method + ',position="0"', per_minute * first),
            counter('spec_decode_draft_seconds_total', method, 60 * draft),
            counter('spec_decode_verify_seconds_total', method, 60 * verify)]


def requests(good, failed=0, queue_full=0):
    return [counter('requests_total', 'api="grpc",outcome="stop"', good, SERVER),
            counter('requests_total', 'api="grpc",outcome="error"', failed, SERVER),
            counter('requests_total', 'api="grpc",outcome="rejected"', queue_full, SERVER),
            counter('requests_rejected_total', 'reason="queue_full"', queue_full, SERVER)]


def first_tokens(per_minute, late):
    return [counter('time_to_first_token_seconds_bucket', 'cache="miss",le="2.5"', per_minute - late, SERVER),
            counter('time_to_first_token_seconds_count', 'cache="miss"', per_minute, SERVER)]


def tokens(per_minute, slow):
    name = 'time_per_output_token_seconds_bucket'
    return [counter(name, 'le="0.01"', per_minute - slow, SERVER), counter(name, 'le="0.1"', per_minute, SERVER),
            counter(name, 'le="+Inf"', per_minute, SERVER)]


def steps(graph, eager, backend='cuda'):
    return [counter('engine_steps_total', 'kind="verify",exec="graph"', graph),
            counter('engine_steps_total', 'kind="verify",exec="eager"', eager),
            gauge('group_info', 'backend="%s"' % backend, 1)]


def contracts(other):
    one, two = (gauge('spec_decode_config_info', 'contract="%s"' % contract, 1, SERVER + ',group="%d"' % group)
                for group, contract in ((0, 'a'), (1, other)))
    return [one, two]


def health(verdict, reason):
    known = {('healthy', 'none'), ('hard_text', 'drafter_unsure'), ('broken', 'confident_and_rejected')}
    return [gauge('spec_decode_health', 'method="dflash",verdict="%s",reason="%s"' % each, each == (verdict, reason)) for each in sorted(known)]


def self_test(result):
    return [gauge('spec_decode_self_test', 'method="dflash",result="%s"' % each, each == result) for each in ('passed', 'failed', 'overridden', 'skipped')]


def context(missing):
    return [counter('spec_decode_context_tokens_total', 'method="dflash"', 1000),
            counter('spec_decode_context_missing_tokens_total', 'method="dflash"', missing)]


def speculation(enabled):
    return [gauge('spec_decode_enabled', 'method="dflash"', enabled), gauge('spec_decode_config_info', 'method="dflash",contract="a"', 1)]


DAY = 86400
# Alert: (minutes until it may fire, series of the fault, series of the sound system, how long the fault lasts, minutes until it
# has resolved). Values of counters are per minute.
CASES = {
    'DflashdAcceptanceCollapsed': [(15, rounds(600, 0.2), rounds(600, 5))],
    'DflashdFirstDraftRejected': [(15, rounds(600, 3, first=0.4), rounds(600, 3, first=0.8))],
    'DflashdSpeculationNotPaying': [(15, rounds(600, 1.5, draft=0.7, verify=0.3), rounds(600, 1.5, draft=0.1, verify=0.9))],
    'DflashdSpeculationSkipped': [
        (30, rounds(10, 5) + [counter('spec_decode_skipped_total', 'reason="auto_batch"', 600)],
         rounds(600, 5) + [counter('spec_decode_skipped_total', 'reason="auto_batch"', 10)]),
        (30, speculation(0), speculation(1))],
    'DflashdDrafterBroken': [(5, health('broken', 'confident_and_rejected'), health('healthy', 'none')),
                             (5, health('broken', 'confident_and_rejected'), health('hard_text', 'drafter_unsure'))],
    'DflashdDrafterLacksContext': [(0, context(3), context(0))],
    'DflashdSelfTestFailed': [(0, self_test('failed'), self_test('passed')), (0, self_test('overridden'), self_test('skipped'))],
    'DflashdFeatureContractsDiffer': [(15, contracts('b'), contracts('a'))],
    'DflashdAbsent': [(5, [], [gauge('ready', '', 1, SERVER)])],
    'DflashdNotReady': [(15, [gauge('ready', '', 0, SERVER), gauge('draining', '', 0, SERVER)],
                         [gauge('ready', '', 1, SERVER), gauge('draining', '', 0, SERVER)]),
                        ],
    'DflashdGroupDown': [(2, [gauge('group_state', 'state="lost"', 1)], [gauge('group_state', 'state="lost"', 0)])],
    'DflashdGroupStuckLoading': [(30, [gauge('group_state', 'state="loading"', 1)], [gauge('group_state', 'state="loading"', 0)])],
    'DflashdGroupFlapping': [(0, [counter('group_epoch', '', 1)], [gauge('group_epoch', '', 2)])],
    'DflashdStepsStalled': [
        (2, [gauge('requests_running', '', 3, SERVER)] + steps(0, 0), [gauge('requests_running', '', 3, SERVER)] + steps(600, 0)),
        (2, [gauge('requests_running', '', 3, SERVER)] + steps(0, 0), [gauge('requests_running', '', 0, SERVER)] + steps(0, 0))],
    'DflashdDrainStuck': [(15, [gauge('draining', '', 1, SERVER)], [gauge('draining', '', 0, SERVER)])],
    'DflashdQueueStuck': [(2, [gauge('oldest_waiting_seconds', '', 61, SERVER)], [gauge('oldest_waiting_seconds', '', 59, SERVER)])],
    'DflashdQueueNearlyFull': [
        (5, [gauge('requests_waiting', '', waiting, SERVER), gauge('queue_limit', 'dimension="requests"', 100, SERVER)],
         [gauge('requests_waiting', '', 80, SERVER), gauge('queue_limit', 'dimension="requests"', 100, SERVER)]) for waiting in (81,)],
    'DflashdRejecting': [(10, requests(94, queue_full=6), requests(96, queue_full=4))],
    'DflashdErrorBudgetBurnsFast': [(0, requests(90, failed=10), requests(94, failed=6))],
    'DflashdErrorBudgetBurns': [(0, requests(960, failed=40), requests(980, failed=20))],
    'DflashdLatencyBudgetBurnsFast': [(0, first_tokens(100, 20), first_tokens(100, 10))],
    'DflashdLatencyBudgetBurns': [(0, first_tokens(100, 8), first_tokens(100, 4))],
    'DflashdTokensSlow': [(10, tokens(1000, 100), tokens(1000, 2))],
    'DflashdRoundsNotCaptured': [(15, steps(80, 20), steps(95, 5)), (15, steps(80, 20), steps(0, 100, backend='cpu'))],
    'DflashdPagesExhausted': [
        (10, [gauge('cache_usage_ratio', 'pool="kv"', 0.99), counter('preemptions_total', 'reason="pages"', 30)],
         [gauge('cache_usage_ratio', 'pool="kv"', 0.99), counter('preemptions_total', 'reason="pages"', 1)])],
    'DflashdCertificateEndsSoon': [
        (0, [gauge('tls_certificate_expiry_timestamp_seconds', 'file="server"', 10 * DAY, SERVER)],
         [gauge('tls_certificate_expiry_timestamp_seconds', 'file="server"', 30 * DAY, SERVER)])],
    'DflashdCertificateEnds': [
        (0, [gauge('tls_certificate_expiry_timestamp_seconds', 'file="server"', 1 * DAY, SERVER)],
         [gauge('tls_certificate_expiry_timestamp_seconds', 'file="server"', 10 * DAY, SERVER)])],
}

# Recording rule: series and value, by hand.
RECORDS = {
    'dflashd:rounds:rate5m': (rounds(600, 5), 10),
    'dflashd:tokens_per_round:5m': (rounds(600, 5), 6),
    'dflashd:acceptance_by_position:5m': (rounds(600, 5, first=0.75), 0.75),
    'dflashd:speculated_ratio:5m': (rounds(600, 5) + [counter('spec_decode_skipped_total', 'reason="auto_batch"', 200)], 0.75),
    'dflashd:speedup:5m': (rounds(600, 5, draft=0.25, verify=0.75), 4.5),
    'dflashd:requests:rate5m': (requests(30, 20, 10), 1),
    **{'dflashd:failed_ratio:' + window: (requests(50, 30, 20), 0.5) for window in ('5m', '30m', '1h', '6h')},
    **{'dflashd:slow_first_token_ratio:' + window: (first_tokens(100, 25), 0.25) for window in ('5m', '30m', '1h', '6h')},
    'dflashd:time_per_output_token_seconds:p99_5m': (tokens(1000, 1000), 0.0991),
}

LEAD = 10       # minutes of a sound system before the fault
FAULT = 50      # minutes of it: more than any alert waits
RECOVERY = 45   # minutes afterwards: every alert looks at a window of at most half an hour


def values(parts, minutes):
    """promtool's notation of one series: what it does in each part, for so many minutes; None: it is not there."""
    out, level = [], 0.0
    for length, part in zip(minutes, parts):
        if part is None:
            out.append('_x%d' % length)
        elif part[0] == 'value':
            out.append('%.10g+0x%d' % (part[1], length - 1))
        else:
            out.append('%.10g+%.10gx%d' % (level, part[1], length - 1))
            level += part[1] * length
    return ' '.join(out)


def input_series(parts, minutes, case='dflashd'):
    maps = [dict(part) for part in parts]
    return [{'series': name.replace('CASE', case), 'values': values([series.get(name) for series in maps], minutes)}
            for name in dict.fromkeys(name for series in maps for name in series)]


def expect(expression, minute, value):
    return {'expr': expression, 'eval_time': '%dm' % minute, 'exp_samples': [{'labels': '{}', 'value': value}]}


def firing(alert, case, minute, count):
    job = ',job="%s"' % case if case else ''
    return expect('count(ALERTS{alertname="%s",alertstate="firing"%s}) or vector(0)' % (alert, job), minute, count)


def expectations(alert, case, wait):
    yield firing(alert, case, LEAD - 1, 0)
    if wait > 1:
        yield firing(alert, case, LEAD + wait - 1, 0)
    yield firing(alert, case, LEAD + FAULT - 1, 1)
    yield firing(alert, case, LEAD + FAULT + RECOVERY - 1, 0)


class Rules(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.promtool = support.require_program('promtool')
        cls.groups = yaml.safe_load(RULES.read_text())['groups']
        cls.alerts = {rule['alert']: rule for group in cls.groups for rule in group['rules'] if 'alert' in rule}
        cls.records = {rule['record'] for group in cls.groups for rule in group['rules'] if 'record' in rule}

    def promtool_test(self, tests):
        with tempfile.TemporaryDirectory(dir=support.memory_folder()) as folder:
            file = pathlib.Path(folder) / 'test.yaml'
            file.write_text(yaml.safe_dump({'rule_files': [str(RULES)], 'evaluation_interval': '1m', 'tests': tests}))
            run = subprocess.run([self.promtool, 'test', 'rules', str(file)], capture_output=True, text=True, env={**os.environ, 'TMPDIR': folder})
        self.assertEqual(run.returncode, 0, run.stdout[-6000:] + run.stderr[-6000:])

    def test_check(self):
        run = subprocess.run([self.promtool, 'check', 'rules', '--lint-fatal', str(RULES)], capture_output=True, text=True)
        self.assertEqual(run.returncode, 0, run.stdout + run.stderr)

    def test_every_alert_has_a_case_and_every_record_a_value(self):
        self.assertEqual(set(CASES), set(self.alerts))
        self.assertEqual(set(RECORDS), self.records)

    def test_alerts_fire_wait_and_resolve(self):
        series, expected, alone = [], [], []
        minutes = [LEAD, FAULT, RECOVERY]
        for alert, cases in CASES.items():
            for index, (wait, bad, good) in enumerate(cases):
                if alert == 'DflashdAbsent':  # of nobody's series
                    alone.append({'name': alert, 'interval': '1m', 'input_series': input_series([good, bad, good], minutes),
                                  'promql_expr_test': list(expectations(alert, '', wait))})
                    continue
                case = '%s-%d' % (alert, index)
                series += input_series([good, bad, good], minutes, case)
                expected += expectations(alert, case, wait)
        self.promtool_test([{'name': 'all', 'interval': '1m', 'input_series': series, 'promql_expr_test': expected}] + alone)

    def test_records(self):
        series, expected = [], []
        for index, (record, (inputs, value)) in enumerate(RECORDS.items()):
            series += input_series([inputs], [LEAD], 'record-%d' % index)
            expected.append(expect('round(sum(%s{job="record-%d"}), 0.0001)' % (record, index), LEAD - 1, value))
        self.promtool_test([{'name': 'records', 'interval': '1m', 'input_series': series, 'promql_expr_test': expected}])

    def test_text_of_an_alert(self):
        """What somebody who is woken reads."""
        self.promtool_test([{
            'name': 'text', 'interval': '1m', 'input_series': input_series([rounds(600, 5), rounds(600, 0.2)], [LEAD, 40]),
            'alert_rule_test': [{
                'alertname': 'DflashdAcceptanceCollapsed', 'eval_time': '%dm' % (LEAD + 39),
                'exp_alerts': [{
                    'exp_labels': {'severity': 'page', 'namespace': 'llm', 'job': 'dflashd', 'instance': 'a:8503', 'model': 'm',
                                   'group': '0'},
                    'exp_annotations': {'summary': 'Drafts of m group 0 are hardly accepted',
                                        'description': 'A round yields 1.20 tokens (1 is plain decoding) on a:8503.',
                                        'runbook_url': 'docs/runbooks/acceptance.md'}}]}]}])

    def test_nothing_fires_on_few_requests(self):
        """Hard text of one or two requests wakes nobody."""
        quiet = rounds(3, 0.1, first=0.1) + requests(1)
        self.promtool_test([{
            'name': 'quiet', 'interval': '1m', 'input_series': input_series([quiet], [60]),
            'promql_expr_test': [expect('count(ALERTS{alertname!="DflashdAbsent"}) or vector(0)', 59, 0)]}])

    def test_runbooks(self):
        for name, rule in self.alerts.items():
            self.assertIn(rule['labels']['severity'], ('page', 'ticket'), name)
            self.assertEqual(set(rule['annotations']), {'summary', 'description', 'runbook_url'}, name)
            file = support.ROOT / rule['annotations']['runbook_url']
            self.assertTrue(file.is_file(), '%s: there is no %s' % (name, file))
            self.assertRegex(file.read_text(), r'\b%s\b' % name)
        known = set(self.alerts)
        for file in (support.ROOT / 'docs' / 'runbooks').glob('*.md'):
            for name in re.findall(r'\bDflashd[A-Z]\w+', file.read_text()):
                self.assertIn(name, known, '%s knows an alert that is not there' % file.name)


if __name__ == '__main__':
    support.main()
