// Grafana's heat map panel is not in @grafana/ui: axes and scales here are its components, the cells are drawn by us.
import { AxisPlacement, ScaleDirection, ScaleOrientation } from '@grafana/schema';
import { UPlotChart, UPlotConfigBuilder } from '@grafana/ui';
import * as schemes from 'd3-scale-chromatic';
import { useMemo } from 'react';

const LEGEND = 34;

export function Heatmap({ frames, panel, theme, width, height, timeRange, timeZone, format }) {
  const rows = useMemo(() => [...frames].sort((a, b) => nameOf(a).localeCompare(nameOf(b), 'en', { numeric: true })), [frames]);
  const values = rows.flatMap((row) => row.fields[1].values.filter(Number.isFinite));
  const { scheme, min, max } = panel.options.color;
  const [least, most] = [min ?? Math.min(...values), max ?? Math.max(...values)];
  // Grafana turns the diverging schemes round, the one of the boards among them.
  const color = (value) => schemes[`interpolate${scheme}`](1 - Math.min(1, Math.max(0, (value - least) / (most - least || 1))));
  const config = useMemo(() => build({ rows, theme, timeRange, timeZone, color, label: panel.options.yAxis?.axisLabel }), [rows, width]);
  const times = rows.reduce((longest, row) => (row.length > longest.length ? row : longest), rows[0]).fields[0].values;
  const data = [times, ...rows.map((_, place) => times.map(() => place))];
  return (
    <div>
      <UPlotChart config={config} data={data} width={width} height={height - LEGEND} timeRange={timeRange} />
      <div style={{ display: 'flex', gap: 8, alignItems: 'center', paddingLeft: 48, fontSize: 12, color: theme.colors.text.secondary }}>
        <span>{format(least)}</span>
        <span style={{ width: 160, height: 8, background: `linear-gradient(90deg, ${[0, 0.25, 0.5, 0.75, 1].map((part) => color(least + part * (most - least)))})` }} />
        <span>{format(most)}</span>
      </div>
    </div>
  );
}

function nameOf(frame) {
  return frame.fields[1].config.displayNameFromDS;
}

function build({ rows, theme, timeRange, timeZone, color, label }) {
  const builder = new UPlotConfigBuilder(timeZone);
  builder.addScale({ scaleKey: 'x', isTime: true, orientation: ScaleOrientation.Horizontal, direction: ScaleDirection.Right, range: () => [timeRange.from.valueOf(), timeRange.to.valueOf()] });
  builder.addScale({ scaleKey: 'y', orientation: ScaleOrientation.Vertical, direction: ScaleDirection.Up, range: () => [-0.5, rows.length - 0.5] });
  builder.addAxis({ scaleKey: 'x', isTime: true, placement: AxisPlacement.Bottom, timeZone, theme, grid: { show: false } });
  builder.addAxis({ scaleKey: 'y', placement: AxisPlacement.Left, theme, label, grid: { show: false }, size: 32, values: () => [] });
  rows.forEach((_, place) => builder.addSeries({ scaleKey: 'y', theme, pathBuilder: () => null, pointsBuilder: () => false, lineColor: 'transparent', fieldName: `row ${place}`, hideInLegend: true }));
  builder.addHook('draw', (plot) => {
    rows.forEach((row, place) => {
      const [at, found] = row.fields.map((field) => field.values);
      const every = Math.min(...at.slice(1).map((time, before) => time - at[before]), row.fields[0].config.interval ?? Infinity);
      const top = plot.valToPos(place + 0.5, 'y', true);
      const bottom = plot.valToPos(place - 0.5, 'y', true);
      Object.assign(plot.ctx, { fillStyle: theme.colors.text.primary, font: `${12 * devicePixelRatio}px sans-serif`, textAlign: 'right', textBaseline: 'middle' });
      plot.ctx.fillText(nameOf(row), plot.bbox.left - 8, (top + bottom) / 2);
      at.forEach((time, index) => {
        if (!Number.isFinite(found[index])) return;
        const left = plot.valToPos(time - every, 'x', true);
        plot.ctx.fillStyle = color(found[index]);
        plot.ctx.fillRect(left, top + 1, plot.valToPos(time, 'x', true) - left + 0.5, bottom - top - 2);
      });
    });
  });
  return builder;
}
