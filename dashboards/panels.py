"""What the dashboards show: the one source of helm/dflashd/dashboards/*.json (dashboards/generate writes them).

A panel is a title, a sentence for the operator, a unit and queries. Queries are built by the few functions below, so that
every one of them has the variables' matchers and no rate divides by zero; metrics are those of base/metric_names.h.
"""

# Matchers of the variables: for series of the whole server, and of one worker group.
S = 'model=~"$model",instance=~"$instance"'
G = S + ',group=~"$group"'
WINDOW = '[$__rate_interval]'


def series(name, *matchers, scope=G):
    return 'dflashd_%s{%s}' % (name, ','.join((scope,) + matchers))


def rate(name, *matchers, scope=G):
    return 'rate(%s%s)' % (series(name, *matchers, scope=scope), WINDOW)


def total(expression, by=''):
    return ('sum by (%s) (%s)' % (by, expression)) if by else 'sum(%s)' % expression


def ratio(part, whole):
    """Nothing where there is no traffic, rather than 0/0."""
    return '%s / (%s > 0)' % (part, whole)


def by_ratio(part, whole, by):
    """A part that has the label `by` over a whole that lacks it."""
    return '%s / on () group_left () (%s > 0)' % (total(part, by), total(whole))


def quantile(q, name, scope=S):
    return 'histogram_quantile(%s, sum by (le) (%s))' % (q, rate(name + '_bucket', scope=scope))


def quantiles(name, scope=S, which=(0.5, 0.9, 0.99)):
    return [(quantile(q, name, scope), 'p%g' % (100 * q)) for q in which]


def mean(name, by='', scope=G):
    return ratio(total(rate(name + '_sum', scope=scope), by), total(rate(name + '_count', scope=scope), by))


class Panel:
    def __init__(self, kind, title, description, unit, queries, width=8, height=8, steps=None, runbook=None, see=None,
                 decimals=None, stack=False, maximum=None, empty=None, names=None):
        self.kind = kind                # stat, timeseries, heatmap, rows (heat map of one series a row), states, table
        self.title = title
        self.description = description
        self.unit = unit                # of Grafana: short, s, percentunit, bytes, ops, ...
        self.queries = queries if isinstance(queries, list) else [(queries, '')]
        self.width, self.height = width, height  # of 24 columns
        self.steps = steps or [(None, 'green')]  # thresholds: (from, colour), the first from None
        self.runbook = runbook          # file of docs/runbooks without .md
        self.see = see                  # another dashboard that goes on from here
        self.decimals, self.stack, self.maximum = decimals, stack, maximum
        self.empty = empty              # why it may show nothing while all is well
        self.names = names or {}        # what values are called: {2: 'ready'}


LOW_IS_BAD = lambda bad, good: [(None, 'red'), (bad, 'yellow'), (good, 'green')]
HIGH_IS_BAD = lambda warn, bad: [(None, 'green'), (warn, 'yellow'), (bad, 'red')]

ROUNDS = 'spec_decode_num_drafts_total'
DRAFTED = 'spec_decode_num_draft_tokens_total'
ACCEPTED = 'spec_decode_num_accepted_tokens_total'


def tokens_per_round(by=''):
    return '1 + ' + ratio(total(rate(ACCEPTED), by), total(rate(ROUNDS), by))


# Zero-padded, so that rows of a heat map stand in order.
def padded(expression, label='position'):
    return 'label_replace(%s, "%s", "0$1", "%s", "([0-9])")' % (expression, label, label)


SPEED_UP = ('(1 + %s) * %s' % (
    ratio(total(rate(ACCEPTED)), total(rate(ROUNDS))),
    ratio(total(rate('spec_decode_verify_seconds_total')),
          '(%s + %s)' % (total(rate('spec_decode_verify_seconds_total')),
                         total(rate('spec_decode_draft_seconds_total'))))))

POSITION_ACCEPTANCE = '%s / (%s > 0)' % (
    total(rate('spec_decode_num_accepted_tokens_per_pos_total'), 'position'),
    total(rate('spec_decode_num_draft_tokens_per_pos_total'), 'position'))

# Of labels that are 1 for one value at a time: a number for each value that is told apart, 0 for the others.
def graded(name, label, grades):
    return ' + '.join(
        '%d * %s' % (grade, total(series(name, '%s="%s"' % (label, value)), 'instance, group')) for value, grade in grades.items())


def accepted_of(part, whole, by):
    return ratio(total(rate('spec_decode_' + part), by), total(rate('spec_decode_' + whole), by))


SPECULATION = [
    ('At a glance', [
        Panel('stat', 'Tokens per round', 'Tokens that one verification yields: 1 + accepted / rounds. 1 means that drafts are never '
              'accepted, the block size is the most. Below 2 on ordinary text something is wrong.',
              'short', tokens_per_round(), 4, 5, LOW_IS_BAD(2, 3), 'acceptance', decimals=2),
        Panel('stat', 'Speed-up, estimated', 'Tokens per round, less the share of time that drafting takes: speed against plain '
              'decoding if a verification takes as long as a plain step, as it does on a GPU with few requests. Below 1 speculation does not pay.',
              'short', SPEED_UP, 4, 5, LOW_IS_BAD(1, 1.5), 'speculation-not-paying', decimals=2),
        Panel('stat', 'First draft accepted', 'Share of rounds whose first draft is accepted. Below a half the drafter does not see '
              'what it was trained on.', 'percentunit',
              ratio(total(rate('spec_decode_num_accepted_tokens_per_pos_total', 'position="0"')),
                    total(rate('spec_decode_num_draft_tokens_per_pos_total', 'position="0"'))),
              4, 5, LOW_IS_BAD(0.5, 0.7), 'acceptance', decimals=1),
        Panel('stat', 'Share of rounds speculated', 'Rounds with drafts, of all decode rounds.', 'percentunit',
              ratio(total(rate(ROUNDS)), '(%s + (%s or vector(0)))' % (total(rate(ROUNDS)), total(rate('spec_decode_skipped_total')))),
              4, 5, LOW_IS_BAD(0.5, 0.9), 'speculation-not-paying', decimals=1),
        Panel('stat', 'Output from drafts', 'Accepted drafts, of all tokens that rounds commit (each round adds one of the '
              "target's own).", 'percentunit',
              ratio(total(rate(ACCEPTED)), '(%s + %s)' % (total(rate(ACCEPTED)), total(rate(ROUNDS)))), 4, 5,
              LOW_IS_BAD(0.5, 0.65), 'acceptance', decimals=1),
        Panel('stat', 'Output tokens', 'Tokens a second of all requests.', 'ops',
              total(rate('generated_tokens_total', scope=S)), 4, 5, see='serving', decimals=0),
    ]),
    ('Acceptance', [
        Panel('timeseries', 'Tokens per round by method', 'As above, over time.', 'short',
              [(tokens_per_round('method'), '{{method}}')], 12, 8, LOW_IS_BAD(2, 3), 'acceptance', decimals=2),
        Panel('timeseries', 'Tokens per round by group', 'One group below the others: its weights, its configuration or its GPU.', 'short',
              [(tokens_per_round('instance, group'), '{{instance}} group {{group}}')], 12, 8, LOW_IS_BAD(2, 3), 'acceptance', decimals=2),
        Panel('rows', 'Acceptance by position', 'Share of drafts accepted at each position of the block (from 00), of those sent to '
              'verification there. It falls slowly from left to right in a sound system; low everywhere is a wrong tap, a sudden edge '
              'a wrong mask or window.', 'percentunit',
              [(padded(POSITION_ACCEPTANCE), '{{position}}')], 12, 9, runbook='acceptance', maximum=1),
        Panel('heatmap', 'Accepted drafts per round', 'How many drafts a round accepts, as a distribution: a mass at 0 or 1 tells a '
              'broken drafter from hard text.', 'short',
              [(total('increase(%s%s)' % (series('spec_decode_accepted_per_step_bucket'), WINDOW), 'le'), '{{le}}')], 12, 9,
              runbook='acceptance'),
        Panel('timeseries', 'Acceptance at positions 0, 3, 7 and 14', 'Lines of the heat map.', 'percentunit',
              [('%s / (%s > 0)' % (
                  total(rate('spec_decode_num_accepted_tokens_per_pos_total', 'position=~"0|3|7|14"'), 'position'),
                  total(rate('spec_decode_num_draft_tokens_per_pos_total', 'position=~"0|3|7|14"'), 'position')),
                'position {{position}}')], 8, 8, LOW_IS_BAD(0.2, 0.5), 'acceptance', maximum=1),
        Panel('timeseries', 'Drafts a second', 'Sent to verification, of these accepted, and, on a CPU, left out since the drafter was unsure of them.', 'ops',
              [(total(rate(DRAFTED)), 'drafted'), (total(rate(ACCEPTED)), 'accepted'),
               (total(rate('spec_decode_num_cut_draft_tokens_total')), 'left out')], 8, 8, see='engine'),
        Panel('timeseries', 'Drafts per round', 'Mean length of the blocks that are verified; shorter than the block size where '
              'the step has no room for more or, on a CPU, the drafter is unsure.', 'short',
              [(ratio(total(rate(DRAFTED)), total(rate(ROUNDS))), 'drafts')], 8, 8, see='engine', decimals=1),
    ]),
    ('Does it pay', [
        Panel('timeseries', 'Speed-up and tokens per round', 'As above, over time: the estimate beside the tokens per round that it cannot exceed.', 'short',
              [(SPEED_UP, 'speed-up'), (tokens_per_round(), 'tokens per round')], 8, 8, LOW_IS_BAD(1, 1.5),
              'speculation-not-paying', decimals=2),
        Panel('timeseries', 'Where a step goes', 'Share of each part in the time of steps. Parts on a GPU overlap; the draft pass '
              'should stay a small one.', 'percentunit',
              [(by_ratio(rate('engine_step_part_seconds_sum'), rate('engine_step_part_seconds_sum'), 'part'), '{{part}}')], 8, 8,
              see='engine', stack=True, maximum=1),
        Panel('timeseries', 'Rounds without drafts, by reason', 'Why sequences decode plainly.', 'ops',
              [(total(rate('spec_decode_skipped_total'), 'reason'), '{{reason}}')], 8, 8, runbook='speculation-not-paying', stack=True),
        Panel('timeseries', 'Rounds by length of their blocks', 'Rows of a block, anchor included: 1 is plain decoding. The scheduler takes '
              'the length that yields most tokens a second, by measured costs and acceptance.', 'ops',
              [(total(rate('spec_decode_block_rounds_total'), 'block_rows'), '{{block_rows}}')], 12, 8, runbook='speculation-not-paying', stack=True),
        Panel('timeseries', 'Rounds by what set that length', 'best: most tokens a second; probe: another length is measured; row_limit: '
              '--max-verify-rows; no_drafts: nobody speculates; asked, whole: blocks are not cut.', 'ops',
              [(total(rate('spec_decode_block_rounds_total'), 'reason'), '{{reason}}')], 12, 8, runbook='speculation-not-paying', stack=True),
        Panel('states', 'Speculation in force', 'For requests that do not choose: 1 on, 0 off (dflashctl speculation).', 'short',
              [(series('spec_decode_enabled'), '{{instance}} group {{group}}')], 12, 6, LOW_IS_BAD(1, 1),
              runbook='speculation-not-paying', names={0: 'off', 1: 'on'}),
        Panel('timeseries', 'Tokens per round against load', 'Acceptance must not depend on how many requests run; if it does, '
              'sequences disturb each other.', 'short',
              [(tokens_per_round(), 'tokens per round'), (total(series('requests_running', scope=S)), 'requests running')], 12, 6,
              see='serving', decimals=1),
    ]),
    ('The text or the integration', [
        Panel('states', 'Verdict on the last rounds', 'Hard text: few drafts are accepted, and the drafter expected no more. Broken: it is sure '
              'of what is rejected, or lacks context; the doctor says where. As of the last 2,048 rounds.', 'short',
              [(graded('spec_decode_health', 'verdict', {'unknown': 1, 'hard_text': 2, 'healthy': 3}), '{{instance}} group {{group}}')], 12, 5,
              [(None, 'red'), (1, 'blue'), (2, 'yellow'), (3, 'green')], 'broken-drafter',
              names={0: 'broken or refused', 1: 'too few rounds', 2: 'hard text', 3: 'healthy'}),
        Panel('states', 'Self-test at start', 'Golden prompts that a group runs before it serves, where it has a golden bundle.', 'short',
              [(graded('spec_decode_self_test', 'result', {'skipped': 1, 'passed': 2}), '{{instance}} group {{group}}')], 8, 5,
              [(None, 'red'), (1, 'blue'), (2, 'green')], 'broken-drafter', names={0: 'failed', 1: 'not run', 2: 'passed'}),
        Panel('stat', 'Context covered', 'Positions before the anchors that are in the drafter\'s context. Always all of them: less is '
              'a defect of the caches.', 'percentunit',
              '1 - ' + ratio(total(rate('spec_decode_context_missing_tokens_total')), total(rate('spec_decode_context_tokens_total'))),
              4, 5, LOW_IS_BAD(0.999999, 1), 'broken-drafter', decimals=2),
        Panel('timeseries', 'First drafts, expected and accepted', 'What the drafter\'s own probabilities promise beside what the target '
              'accepts, over the rounds of the verdict. Two lines that fall together are text; a gap is a defect.', 'percentunit',
              [('avg(%s + %s)' % (series('spec_decode_first_draft_acceptance'), series('spec_decode_calibration_gap')), 'expected'),
               ('avg(%s)' % series('spec_decode_first_draft_acceptance'), 'accepted')], 8, 8, LOW_IS_BAD(0.4, 0.5), 'broken-drafter', maximum=1),
        Panel('rows', 'Expected less accepted, by position', 'Drafts that the drafter promised at each position (from 00) and the target '
              'did not accept, of those drafted there. Dark is right; the row where it lights up is where to look.', 'percentunit',
              [(padded('clamp_min((%s - %s) / (%s > 0), 0)' % (
                  total(rate('spec_decode_predicted_tokens_per_pos_total'), 'position'),
                  total(rate('spec_decode_num_accepted_tokens_per_pos_total'), 'position'),
                  total(rate('spec_decode_num_draft_tokens_per_pos_total'), 'position'))), '{{position}}')], 8, 8,
              runbook='broken-drafter', maximum=0.25),
        Panel('rows', 'Accepted by confidence', 'Share of drafts accepted, by the probability that the drafter gave them. A sound drafter '
              'has as much in each row as its name says.', 'percentunit',
              [(accepted_of('confidence_accepted_total', 'confidence_drafts_total', 'confidence'), '{{confidence}}')], 8, 8,
              runbook='broken-drafter', maximum=1),
        Panel('timeseries', 'Gap by group', 'Probability of first drafts less the share accepted, over the rounds of the verdict. Near 0 '
              'whatever the text.', 'percentunit', [(series('spec_decode_calibration_gap'), '{{instance}} group {{group}}')], 8, 7,
              HIGH_IS_BAD(0.1, 0.2), 'broken-drafter'),
        Panel('timeseries', 'Rounds that the verdict rests on', 'At least 128, at most 2,048, at temperatures up to 1.', 'short',
              [(series('spec_decode_health_rounds'), '{{instance}} group {{group}}')], 8, 7, LOW_IS_BAD(128, 128), 'broken-drafter'),
        Panel('timeseries', 'Tokens per round by content', 'thinking, tool calls, code, text: hard text is hard in one of them, a defect '
              'in all.', 'short', [('1 + ' + accepted_of('content_accepted_tokens_total', 'content_drafts_total', 'content'), '{{content}}')],
              8, 7, LOW_IS_BAD(2, 3), 'acceptance', decimals=2),
        Panel('timeseries', 'First draft accepted by content', 'Share of rounds whose first draft is accepted.', 'percentunit',
              [(accepted_of('content_first_accepted_total', 'content_drafts_total', 'content'), '{{content}}')], 8, 7,
              LOW_IS_BAD(0.5, 0.7), 'acceptance', maximum=1),
        Panel('timeseries', 'Share of drafts accepted by content', 'Of all that are sent to verification there.', 'percentunit',
              [(accepted_of('content_accepted_tokens_total', 'content_draft_tokens_total', 'content'), '{{content}}')], 8, 7,
              runbook='acceptance', maximum=1),
        Panel('timeseries', 'First draft accepted by origin', 'Of the context: cold: computed from the prompt, prefix: begun with a cached '
              'prefix, resumed: computed again after a preemption. One below the others is a defect of that path.', 'percentunit',
              [(accepted_of('origin_first_accepted_total', 'origin_drafts_total', 'origin'), '{{origin}}')], 4, 7,
              LOW_IS_BAD(0.5, 0.7), 'broken-drafter', maximum=1),
        Panel('timeseries', 'Tokens per round by origin', 'The same, in tokens.', 'short',
              [('1 + ' + accepted_of('origin_accepted_tokens_total', 'origin_drafts_total', 'origin'), '{{origin}}')], 4, 7,
              LOW_IS_BAD(2, 3), 'broken-drafter', decimals=2),
    ]),
    ('What the drafter was given', [
        Panel('table', 'Feature contract', 'How the drafter was read: taps, masks and windows of its layers, mask token, revisions. '
              'All rows must agree.', 'short', [(series('spec_decode_config_info'), '')], 24, 6, runbook='feature-contract'),
    ]),
]

SERVING = [
    ('Traffic', [
        Panel('stat', 'Ready', 'Servers that take requests.', 'short', total(series('ready', scope=S)), 4, 5, LOW_IS_BAD(1, 1), 'group-down'),
        Panel('stat', 'Good requests', 'Requests that ended by themselves (stop, length), of all but those that clients cancelled '
              'or got wrong.', 'percentunit',
              ratio(total(rate('requests_total', 'outcome=~"stop|length"', scope=S)),
                    total(rate('requests_total', 'outcome=~"stop|length|error|deadline"', scope=S))),
              4, 5, LOW_IS_BAD(0.99, 0.995), 'errors', decimals=2),
        Panel('stat', 'First token, p99', 'From received to the first token ready to send.', 's',
              quantile(0.99, 'time_to_first_token_seconds'), 4, 5, HIGH_IS_BAD(1, 2.5), 'latency'),
        Panel('stat', 'Time per token, p99', 'Between two outputs of a request, per token.', 's',
              quantile(0.99, 'time_per_output_token_seconds'), 4, 5, HIGH_IS_BAD(0.02, 0.05), 'latency'),
        Panel('stat', 'Waiting', 'Requests in the queue.', 'short', total(series('requests_waiting', scope=S)), 4, 5,
              HIGH_IS_BAD(8, 64), 'queue'),
        Panel('stat', 'Goodput', 'Output tokens a second.', 'ops', total(rate('generated_tokens_total', scope=S)), 4, 5, see='speculation'),
        Panel('timeseries', 'Requests by outcome', 'Each request is counted once, when it ends.', 'reqps',
              [(total(rate('requests_total', scope=S), 'outcome'), '{{outcome}}')], 8, 8, runbook='errors', stack=True),
        Panel('timeseries', 'Refused, by reason', 'queue_full and queue_timeout mean too little capacity; invalid, too_long, '
              'unauthenticated, slow_consumer and the limits are the client\'s.', 'reqps',
              [(total(rate('requests_rejected_total', scope=S), 'reason'), '{{reason}}')], 8, 8, runbook='queue', stack=True),
        Panel('timeseries', 'Calls by result', 'Calls of the public API by gRPC code.', 'reqps',
              [(total(rate('grpc_server_handled_total', scope=S), 'code'), '{{code}}')], 8, 8, runbook='errors', stack=True),
    ]),
    ('Latency', [
        Panel('timeseries', 'Time to first token', 'Percentiles over all requests.', 's', quantiles('time_to_first_token_seconds'), 8, 8,
              HIGH_IS_BAD(1, 2.5), 'latency'),
        Panel('timeseries', 'Mean time to first token by prefix cache', 'hit, partial and miss: what the prefix cache saves.', 's',
              [(mean('time_to_first_token_seconds', 'cache', scope=S), '{{cache}}')], 8, 8, HIGH_IS_BAD(1, 2.5), see='engine'),
        Panel('heatmap', 'Time to first token, distribution', 'Requests per bucket.', 's',
              [(total('increase(%s%s)' % (series('time_to_first_token_seconds_bucket', scope=S), WINDOW), 'le'), '{{le}}')], 8, 8,
              runbook='latency'),
        Panel('timeseries', 'Time per output token', 'Gap between two outputs, divided by the tokens of the second: what a reader feels.',
              's', quantiles('time_per_output_token_seconds'), 8, 8, HIGH_IS_BAD(0.02, 0.05), 'latency'),
        Panel('timeseries', 'Gap between outputs', 'One output has as many tokens as its round accepted, plus one. Other engines call '
              'this inter-token latency.', 's', quantiles('step_interval_seconds'), 8, 8, HIGH_IS_BAD(0.05, 0.1), 'latency'),
        Panel('timeseries', 'Mean time per token of a request', 'p50 and p99 over finished requests.', 's',
              quantiles('request_time_per_output_token_seconds', which=(0.5, 0.99)), 8, 8, HIGH_IS_BAD(0.02, 0.05), 'latency'),
        Panel('timeseries', 'Whole requests', 'From received to ended.', 's', quantiles('request_seconds'), 8, 8, HIGH_IS_BAD(60, 300), 'latency'),
        Panel('timeseries', 'Where a request\'s time goes, mean', 'Waiting, prompt, output.', 's',
              [(mean('request_queue_seconds', scope=S), 'queue'), (mean('request_prefill_seconds', scope=S), 'prompt'),
               (mean('request_decode_seconds', scope=S), 'output')], 8, 8, HIGH_IS_BAD(60, 300), 'latency', stack=True),
        Panel('timeseries', 'First tokens within 2.5 s, tokens within 50 ms', 'What the objectives of the alerts are about.', 'percentunit',
              [(ratio(total(rate('time_to_first_token_seconds_bucket', 'le="2.5"', scope=S)),
                      total(rate('time_to_first_token_seconds_count', scope=S))), 'first token'),
               (ratio(total(rate('time_per_output_token_seconds_bucket', 'le="0.05"', scope=S)),
                      total(rate('time_per_output_token_seconds_count', scope=S))), 'tokens')], 8, 8,
              LOW_IS_BAD(0.99, 0.995), 'latency', maximum=1),
    ]),
    ('Queue and load', [
        Panel('timeseries', 'Running and waiting', 'Requests in worker groups, and in the queue.', 'short',
              [(total(series('requests_running', scope=S)), 'running'), (total(series('requests_waiting', scope=S)), 'waiting')], 8, 8,
              runbook='queue'),
        Panel('timeseries', 'Queue against its bounds', 'Share of the bounds on requests and on prompt tokens.', 'percentunit',
              [('%s / on (instance, model) %s' % (series('requests_waiting', scope=S), series('queue_limit', 'dimension="requests"', scope=S)),
                'requests {{instance}}'),
               ('%s / on (instance, model) %s' % (series('waiting_prompt_tokens', scope=S), series('queue_limit', 'dimension="tokens"', scope=S)),
                'prompt tokens {{instance}}')], 8, 8, HIGH_IS_BAD(0.5, 0.8), 'queue'),
        Panel('timeseries', 'Oldest waiting request', 'Its age; it grows without end when nobody takes requests.', 's',
              [(series('oldest_waiting_seconds', scope=S), '{{instance}}')], 8, 8, HIGH_IS_BAD(10, 60), 'queue'),
        Panel('timeseries', 'Time in the queue', 'From received to handed to a worker group.', 's', quantiles('request_queue_seconds'), 8, 8,
              HIGH_IS_BAD(1, 10), 'queue'),
        Panel('timeseries', 'Tokens a second', 'Output; prompt computed; prompt found in the prefix cache.', 'ops',
              [(total(rate('generated_tokens_total', scope=S)), 'output'),
               (total(rate('prompt_tokens_total', scope=S), 'source'), 'prompt {{source}}')], 8, 8, see='engine'),
        Panel('timeseries', 'Tokens of a request', 'Median and p99 of prompts and outputs.', 'short',
              [(quantile(q, 'request_%s_tokens' % kind), '%s p%g' % (kind, 100 * q)) for kind in ('prompt', 'output') for q in (0.5, 0.99)],
              8, 8, see='engine'),
        Panel('states', 'Draining', 'A server that goes down takes nothing new.', 'short',
              [(series('draining', scope=S), '{{instance}}')], 12, 4, HIGH_IS_BAD(1, 1), runbook='draining', names={0: 'no', 1: 'draining'}),
        Panel('timeseries', 'Spans for the trace collector', 'A second: exported; dropped because it did not take them, or because too many waited.',
              'ops', [(total(rate('trace_spans_total', scope=S), 'outcome'), '{{outcome}}')], 12, 4, see='serving',
              empty='no --otlp-endpoint'),
    ]),
]

ENGINE = [
    ('Steps', [
        Panel('timeseries', 'Steps a second by kind', 'prefill: prompt rows only, verify: decode rows only, mixed: both.', 'ops',
              [(total(rate('engine_steps_total'), 'kind'), '{{kind}}')], 8, 8, see='groups', stack=True),
        Panel('timeseries', 'Steps as captured graphs', 'Share of steps that run as a graph. On a GPU nearly all decode steps, on a '
              'CPU none.', 'percentunit',
              [(by_ratio(rate('engine_steps_total', 'exec="graph"'), rate('engine_steps_total'), 'kind'), '{{kind}}')], 8, 8,
              runbook='latency', maximum=1),
        Panel('timeseries', 'Time of a step', 'Median and p99 over all kinds.', 's', quantiles('engine_step_seconds', scope=G, which=(0.5, 0.99)),
              8, 8, HIGH_IS_BAD(0.05, 0.1), 'latency'),
        Panel('timeseries', 'Mean time of a step by kind', 'A mixed step reads the weights twice.', 's',
              [(mean('engine_step_seconds', 'kind'), '{{kind}}')], 8, 8, HIGH_IS_BAD(0.05, 0.1), 'latency'),
        Panel('timeseries', 'Mean time of the parts', 'schedule, draft, verify (the target), sample, commit, detokenize.', 's',
              [(mean('engine_step_part_seconds', 'part'), '{{part}}')], 8, 8, HIGH_IS_BAD(0.05, 0.1), see='speculation', stack=True),
        Panel('timeseries', 'Sequences and rows in a step, mean', 'How full steps are.', 'short',
              [(mean('batch_size'), 'sequences'), (mean('batch_tokens'), 'rows')], 8, 8, see='serving', decimals=1),
    ]),
    ('Memory of sequences', [
        Panel('timeseries', 'Use of the pools', 'kv: pages of keys, values and drafter context; state: slots of recurrent state; '
              'checkpoint: states kept for the prefix cache.', 'percentunit',
              [('max by (pool) (%s)' % series('cache_usage_ratio'), '{{pool}}')], 8, 8, HIGH_IS_BAD(0.9, 0.97), 'pools', maximum=1),
        Panel('timeseries', 'Blocks of the kv pool', 'Evictable ones hold cached prefixes that nobody uses now.', 'short',
              [(total(series('cache_blocks', 'pool="kv"'), 'state'), '{{state}}')], 8, 8, runbook='pools', stack=True),
        Panel('timeseries', 'Preemptions', 'Running requests that gave their pages back, to be resumed later.', 'ops',
              [(total(rate('preemptions_total'), 'reason'), '{{reason}}')], 8, 8, HIGH_IS_BAD(0.1, 0.5), 'pools'),
    ]),
    ('Prefix cache', [
        Panel('timeseries', 'Prompt tokens found', 'Share of looked-up prompt tokens that requests could begin with.', 'percentunit',
              [(ratio(total(rate('prefix_cache_hit_tokens_total', 'pool="effective"')), total(rate('prefix_cache_queried_tokens_total'))), 'found')],
              8, 8, runbook='pools', maximum=1),
        Panel('timeseries', 'Found by pool', 'A hit is the least of all pools. A pool below the others costs hits.', 'ops',
              [(total(rate('prefix_cache_hit_tokens_total'), 'pool'), '{{pool}}')], 8, 8, runbook='pools'),
        Panel('timeseries', 'What shortened hits', 'Requests that could have begun further on, had this pool had as much as the '
              'others. draft_full must stay at zero: drafter context lies in the same pages.', 'ops',
              [(total(rate('prefix_cache_limited_total'), 'pool'), '{{pool}}')], 8, 8, runbook='pools'),
        Panel('timeseries', 'Given up by the prefix cache', 'Pages and checkpoints evicted for want of room.', 'ops',
              [(total(rate('prefix_cache_evictions_total'), 'pool'), '{{pool}}')], 8, 8, runbook='pools', stack=True),
    ]),
]

GROUPS = [
    ('Groups', [
        Panel('states', 'State of the groups', 'loading, ready or lost.', 'short',
              [(graded('group_state', 'state', {'loading': 1, 'ready': 2}), '{{instance}} group {{group}}')], 12, 7,
              [(None, 'red'), (1, 'yellow'), (2, 'green')], 'group-down', names={0: 'lost', 1: 'loading', 2: 'ready'}),
        Panel('timeseries', 'Ranks that answer', 'Ranks of each group, while it serves.', 'short',
              [(total(series('worker_up'), 'instance, group'), '{{instance}} group {{group}}')], 12, 7, LOW_IS_BAD(1, 1), 'group-down'),
        Panel('timeseries', 'Lives', 'Epoch of each group; a rising line is a group that dies again and again.', 'short',
              [(series('group_epoch'), '{{instance}} group {{group}}')], 8, 7, HIGH_IS_BAD(2, 5), 'group-down'),
        Panel('timeseries', 'Lives that ended unasked, by cause', 'Within an hour.', 'short',
              [(total('increase(%s[1h])' % series('group_reforms_total'), 'cause'), '{{cause}}')], 8, 7, HIGH_IS_BAD(1, 2), 'group-down'),
        Panel('timeseries', 'Last heard of', 'Age of the leader\'s last heartbeat; at --silence-timeout (5 s) the group is ended.', 's',
              [('max by (instance, group) (%s)' % series('worker_heartbeat_age_seconds'), '{{instance}} group {{group}}')], 8, 7,
              HIGH_IS_BAD(2, 4), 'group-down'),
    ]),
    ('Memory and build', [
        Panel('timeseries', 'Device memory of rank 0 by pool', 'As planned before loading, and then taken.', 'bytes',
              [(total(series('memory_bytes'), 'kind'), '{{kind}}')], 12, 8, runbook='pools', stack=True),
        Panel('stat', 'Certificates end in', 'Of the listening ports.', 's',
              [('min by (file) (%s) - time()' % series('tls_certificate_expiry_timestamp_seconds', scope=S), '{{file}}')], 4, 8,
              LOW_IS_BAD(172800, 1209600), 'certificates', empty='the server has no TLS'),
        Panel('table', 'Versions', 'Of the servers.', 'short', [(series('build_info', scope=S), '')], 4, 8, see='serving'),
        Panel('table', 'Backends', 'What groups run on.', 'short', [(series('group_info'), '')], 4, 8, see='engine'),
    ]),
    ('GPUs (dcgm-exporter)', [
        Panel('timeseries', 'Use', 'From dcgm-exporter, where there is one: all GPUs that this Prometheus knows.', 'percent',
              [('avg by (Hostname, gpu) (DCGM_FI_DEV_GPU_UTIL)', '{{Hostname}} {{gpu}}')], 8, 7, see='engine', maximum=100,
              empty='there is no dcgm-exporter'),
        Panel('timeseries', 'Memory in use', 'The same, of GPU memory.', 'decmbytes',
              [('max by (Hostname, gpu) (DCGM_FI_DEV_FB_USED)', '{{Hostname}} {{gpu}}')], 8, 7, see='engine', empty='there is no dcgm-exporter'),
        Panel('timeseries', 'Power', 'The same, in watts.', 'watt',
              [('max by (Hostname, gpu) (DCGM_FI_DEV_POWER_USAGE)', '{{Hostname}} {{gpu}}')], 8, 7, see='engine', empty='there is no dcgm-exporter'),
    ]),
]

# File name: (title, one sentence, rows).
DASHBOARDS = {
    'speculation': ('Speculation', 'Does speculation pay, and if not, why.', SPECULATION),
    'serving': ('Serving', 'What clients get: traffic, outcomes, latency, queue.', SERVING),
    'engine': ('Engine and caches', 'What worker groups do with their time and memory.', ENGINE),
    'groups': ('Groups and GPUs', 'Whether worker groups live.', GROUPS),
}
