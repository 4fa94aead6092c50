// One panel: Grafana's components, with the options that the dashboard's JSON gives.
import {
  FieldColorModeId, FieldType, applyFieldOverrides, cacheFieldDisplayNames, dateTime, getDisplayProcessor, getDisplayValueAlignmentFactors,
  getFieldDisplayValues, transformDataFrame,
} from '@grafana/data';
import { BarGauge, BigValue, PanelChrome, TimeSeries, VizRepeater } from '@grafana/ui';
import { TableNG } from '@grafana/ui/unstable'; // the one of Grafana 13's table panel
import { lastValueFrom } from 'rxjs';
import { OPTIONS } from './fields.js';
import { Heatmap } from './heatmap.jsx';
import { framesOf } from './prometheus.js';

export const ZONE = 'utc';

export async function dataOf(panel, job, theme) {
  let frames = await framesOf(panel, job);
  if (panel.transformations?.length) frames = await lastValueFrom(transformDataFrame(panel.transformations, frames));
  const fieldConfig = structuredClone(panel.fieldConfig ?? { defaults: {}, overrides: [] });
  fieldConfig.defaults.color ??= { mode: FieldColorModeId.PaletteClassic };
  const replaceVariables = (text) => text;
  frames = applyFieldOverrides({ data: frames, fieldConfig, replaceVariables, theme, timeZone: ZONE, fieldConfigRegistry: OPTIONS });
  cacheFieldDisplayNames(frames);
  return frames;
}

export function Panel({ panel, frames, marks, job, theme, width, height }) {
  return (
    <PanelChrome title={panel.title} width={width} height={height}>
      {(inner, tall) => <Body {...{ panel, frames, marks, job, theme }} width={inner} height={tall} />}
    </PanelChrome>
  );
}

function Body(props) {
  const { panel, frames, job, width, height, theme } = props;
  const timeRange = { from: dateTime(job.begin * 1000), to: dateTime(job.end * 1000), raw: { from: '', to: '' } };
  if (!frames.some((frame) => frame.length) && panel.type !== 'stat') {
    return <div style={{ ...CENTERED, width, height, color: theme.colors.text.secondary }}>{panel.fieldConfig.defaults.noValue ?? 'No data'}</div>;
  }
  return KINDS[panel.type]({ ...props, timeRange });
}

const CENTERED = { display: 'flex', alignItems: 'center', justifyContent: 'center', textAlign: 'center' };
const KINDS = { timeseries: lines, stat: figures, bargauge: bars, heatmap: heat, table };

function lines({ panel, frames, marks, theme, width, height, timeRange }) {
  const paint = (builder) => {
    builder.addHook('draw', (plot) => marks.forEach((mark) => drawMark(plot, mark, theme)));
    return null;
  };
  return (
    <TimeSeries {...{ frames, width, height, timeRange }} timeZone={ZONE} legend={{ calcs: [], ...panel.options.legend }} options={panel.options}>
      {paint}
    </TimeSeries>
  );
}

function drawMark({ ctx, bbox, valToPos }, { time, color }, theme) {
  const x = Math.round(valToPos(time, 'x', true)) + 0.5;
  ctx.save();
  ctx.strokeStyle = ctx.fillStyle = theme.visualization.getColorByName(color);
  ctx.setLineDash([4, 4]);
  ctx.beginPath();
  ctx.moveTo(x, bbox.top);
  ctx.lineTo(x, bbox.top + bbox.height);
  ctx.stroke();
  ctx.restore();
}

function displayed({ panel, frames, theme }) {
  return getFieldDisplayValues({
    fieldConfig: panel.fieldConfig, reduceOptions: { values: false, ...panel.options.reduceOptions }, replaceVariables: (text) => text,
    theme, data: frames, sparkline: panel.type === 'stat' && panel.options.graphMode !== 'none', timeZone: ZONE,
  });
}

function figures(props) {
  const { panel, theme, width, height } = props;
  return (
    <VizRepeater
      getValues={() => displayed(props)}
      renderValue={({ value, width, height, count }) => (
        <BigValue
          value={value.display} sparkline={value.sparkline} colorMode={panel.options.colorMode} graphMode={panel.options.graphMode}
          textMode={count > 1 ? panel.options.textMode : 'value'} theme={theme} width={width} height={height} count={count}
        />
      )}
      {...{ width, height }} source={props.frames} renderCounter={1} autoGrid orientation={panel.options.orientation}
    />
  );
}

function bars(props) {
  const { panel, theme, width, height } = props;
  return (
    <VizRepeater
      getValues={() => displayed(props)}
      getAlignmentFactors={getDisplayValueAlignmentFactors}
      renderValue={({ value, width, height, orientation, alignmentFactors }) => (
        <BarGauge
          value={value.display} field={value.field} display={value.view?.getFieldDisplayProcessor(value.colIndex)} text={panel.options.text}
          displayMode={panel.options.displayMode} valueDisplayMode={panel.options.valueMode} showUnfilled={panel.options.showUnfilled} namePlacement={panel.options.namePlacement}
          {...{ width, height, orientation, theme, alignmentFactors }} lcdCellWidth={12} itemSpacing={8}
        />
      )}
      {...{ width, height }} source={props.frames} renderCounter={1} orientation={panel.options.orientation} minVizHeight={panel.options.minVizHeight} maxVizHeight={panel.options.maxVizHeight}
    />
  );
}

function heat(props) {
  const config = { unit: props.panel.options.cellValues?.unit };
  const processor = getDisplayProcessor({ field: { type: FieldType.number, config }, theme: props.theme });
  const format = (value) => {
    const { prefix = '', text, suffix = '' } = processor(value);
    return `${prefix}${text}${suffix}`;
  };
  return <Heatmap {...props} timeZone={ZONE} format={format} />;
}

function table({ frames, width, height, panel }) {
  return <TableNG data={frames[0]} structureRev={1} {...{ width, height }} noHeader={panel.options.showHeader === false} columnMinWidth={70} />;
}
