// Queries of panels to a real Prometheus, and its answers as Grafana's data frames.
import { FieldType, toDataFrame } from '@grafana/data';

const MOST_POINTS = 400;

// What Grafana fills in before it asks: variables, and intervals by the rule of its Prometheus data source.
export function filled(expression, job) {
  const step = stepOf(job);
  const known = {
    ...job.variables,
    __rate_interval: `${Math.max(step + job.scrape, 4 * job.scrape)}s`,
    __interval: `${step}s`,
    __range: `${Math.round(job.end - job.begin)}s`,
  };
  return expression.replace(/\$\{(\w+)\}|\$(\w+)/g, (whole, braced, plain) => {
    const value = known[braced ?? plain];
    if (value === undefined) throw new Error(`${whole} is no known variable`);
    return value;
  });
}

export function stepOf(job) {
  return Math.max(job.scrape, Math.ceil((job.end - job.begin) / MOST_POINTS));
}

async function ask(job, path, parameters, again = 5) {
  let body;
  try {
    const answer = await fetch(`${job.prometheus}/api/v1/${path}?${new URLSearchParams(parameters)}`);
    body = await answer.json();
  } catch (error) {
    if (!again) throw error; // on a busy machine a connection may fail
    await new Promise((done) => setTimeout(done, 1000));
    return ask(job, path, parameters, again - 1);
  }
  if (body.status !== 'success') throw new Error(`${parameters.query}: ${body.error}`);
  return body.data.result;
}

function range(job, query) {
  return ask(job, 'query_range', { query, start: job.begin, end: job.end, step: stepOf(job) });
}

function named(labels, format) {
  if (!format || format === '__auto') return Object.entries(labels).map(([key, value]) => `${key}="${value}"`).join(', ');
  return format.replace(/\{\{\s*(\w+)\s*\}\}/g, (_, label) => labels[label] ?? '');
}

export async function framesOf(panel, job) {
  const answers = await Promise.all((panel.targets ?? []).map((target) => framesOfTarget(target, job)));
  return answers.flat();
}

async function framesOfTarget(target, job) {
  const query = filled(target.expr, job);
  if (target.instant) {
    const result = await ask(job, 'query', { query, time: job.end });
    return target.format === 'table' ? [tabled(target, result)] : result.map((one) => frame(target, one.metric, [one.value], 0));
  }
  const result = await range(job, query);
  return result.map((one) => frame(target, one.metric, gapped(one.values, job), stepOf(job) * 1000));
}

// A value for every step, as Grafana draws it: where Prometheus has none, the line ends.
function gapped(values, job) {
  const known = new Map(values.map(([at, value]) => [Math.round((at - job.begin) / stepOf(job)), value]));
  const steps = Math.floor((job.end - job.begin) / stepOf(job)) + 1;
  return Array.from({ length: steps }, (_, place) => [job.begin + place * stepOf(job), known.get(place) ?? null]);
}

function frame(target, labels, values, interval) {
  return toDataFrame({
    refId: target.refId,
    meta: { type: 'timeseries-multi' },
    fields: [
      { name: 'Time', type: FieldType.time, values: values.map(([at]) => at * 1000), config: interval ? { interval } : {} },
      {
        name: 'Value',
        type: FieldType.number,
        labels,
        values: values.map(([, value]) => (value === null ? null : Number(value))),
        config: { displayNameFromDS: named(labels, target.legendFormat) },
      },
    ],
  });
}

function tabled(target, result) {
  const labels = [...new Set(result.flatMap((one) => Object.keys(one.metric)))].sort();
  return toDataFrame({
    refId: target.refId,
    fields: [
      { name: 'Time', type: FieldType.time, values: result.map((one) => one.value[0] * 1000), config: {} },
      ...labels.map((name) => ({ name, type: FieldType.string, values: result.map((one) => one.metric[name] ?? ''), config: {} })),
      { name: `Value #${target.refId}`, type: FieldType.number, values: result.map((one) => Number(one.value[1])), config: {} },
    ],
  });
}

// Marks over all panels; where Grafana would join neighbours into a region, the first of them is drawn.
export async function marksOf(dashboard, job) {
  const found = [];
  for (const event of dashboard.annotations?.list ?? []) {
    if (!event.expr) continue;
    for (const series of await range(job, filled(event.expr, job))) {
      let last = -Infinity;
      for (const [at, value] of series.values) {
        const time = event.useValueForTime ? Number(value) : at * 1000;
        if (Number(value) > 0 && time > job.begin * 1000 && time - last > 15000) found.push({ time, color: event.iconColor });
        if (Number(value) > 0) last = time;
      }
    }
  }
  return found;
}
