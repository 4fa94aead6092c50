// The parts of Grafana's registries that the boards use: options of fields, and transformations of tables.
import { Registry, standardTransformers, standardTransformersRegistry } from '@grafana/data';

const STANDARD = ['unit', 'min', 'max', 'decimals', 'displayName', 'noValue', 'thresholds', 'color', 'mappings', 'links'];
const CUSTOM = [
  'drawStyle', 'lineInterpolation', 'lineWidth', 'fillOpacity', 'gradientMode', 'lineStyle', 'spanNulls', 'insertNulls',
  'showPoints', 'pointSize', 'stacking', 'axisPlacement', 'axisLabel', 'axisColorMode', 'scaleDistribution', 'hideFrom',
  'thresholdsStyle', 'axisSoftMin', 'axisSoftMax', 'align', 'cellOptions', 'width', 'minWidth',
];

function option(id, isCustom) {
  return { id: isCustom ? `custom.${id}` : id, path: id, name: id, isCustom, process: (value) => value, shouldApply: () => true };
}

export const OPTIONS = new Registry(() => [...STANDARD.map((id) => option(id, false)), ...CUSTOM.map((id) => option(id, true))]);

export function registerTransformations() {
  standardTransformersRegistry.setInit(() =>
    [standardTransformers.mergeTransformer, standardTransformers.organizeFieldsTransformer].map((transformation) => ({
      id: transformation.id,
      name: transformation.name,
      transformation: () => Promise.resolve(transformation),
    }))
  );
}
