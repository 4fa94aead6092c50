// Draws one dashboard into the page: window.JOB says which, from which Prometheus, and over what time.
import { createTheme, ThemeContext } from '@grafana/data';
import { GlobalStyles } from '@grafana/ui';
import medium from 'inter-ui/web/Inter-Medium.woff2';
import regular from 'inter-ui/web/Inter-Regular.woff2';
import { createRoot } from 'react-dom/client';
import { registerTransformations } from './fields.js';
import { Panel, dataOf } from './panels.jsx';
import { marksOf } from './prometheus.js';

const COLUMNS = 24;
const CELL = 30;
const GAP = 8;
const EDGE = 16;
const PHONE = 769; // below it, Grafana puts all panels into one column

// Where a panel stands, as Grafana's grid does it.
function placed(panels, width) {
  const inner = width - 2 * EDGE;
  const tall = (h) => h * CELL + (h - 1) * GAP;
  if (width >= PHONE) {
    const column = (inner + GAP) / COLUMNS;
    return panels.map(({ gridPos: { x, y, w, h } }) => ({ left: x * column, top: y * (CELL + GAP), width: w * column - GAP, height: tall(h) }));
  }
  let top = 0;
  return panels.map(({ gridPos: { h } }) => {
    const place = { left: 0, top, width: inner, height: tall(h) };
    top += place.height + GAP;
    return place;
  });
}

function Board({ job, panels, frames, marks, theme }) {
  const places = placed(panels, job.width);
  const height = Math.max(...places.map((place) => place.top + place.height));
  const { text } = theme.colors;
  return (
    <div style={{ padding: EDGE, width: job.width, boxSizing: 'border-box', background: theme.colors.background.canvas }}>
      <h3 style={{ margin: 0 }}>{job.dashboard.title}</h3>
      <p style={{ color: text.secondary, margin: '4px 0 12px' }}>{job.subtitle}</p>
      <div style={{ position: 'relative', height }}>
        {panels.map((panel, index) => (
          <div key={panel.id} className={`drawn-${panel.type}`} data-title={panel.title} style={{ position: 'absolute', ...places[index] }}>
            {panel.type === 'row' ? (
              <div style={{ lineHeight: `${CELL}px`, fontWeight: 500 }}>{panel.title}</div>
            ) : (
              <Panel {...{ panel, marks, job, theme, frames: frames[index] }} width={places[index].width} height={places[index].height} />
            )}
          </div>
        ))}
      </div>
    </div>
  );
}

// Grafana measures labels in Inter, which its packages lack. Without it they are drawn in another, wider font, and cut.
async function loadFont() {
  const faces = Object.entries({ 400: regular, 500: medium }).map(([weight, url]) => new FontFace('Inter', `url(${url})`, { weight }));
  await Promise.all(faces.map((face) => face.load()));
  faces.forEach((face) => document.fonts.add(face));
}

async function draw(job) {
  await loadFont();
  registerTransformations();
  const theme = createTheme({ colors: { mode: 'dark' } });
  const panels = [...job.dashboard.panels].sort((a, b) => a.gridPos.y - b.gridPos.y || a.gridPos.x - b.gridPos.x);
  const frames = await Promise.all(panels.map((panel) => (panel.type === 'row' ? [] : dataOf(panel, job, theme))));
  const marks = await marksOf(job.dashboard, job);
  window.EMPTY = panels.filter((panel, index) => panel.type !== 'row' && !frames[index].some((frame) => frame.length)).map((panel) => panel.title);
  createRoot(document.getElementById('board')).render(
    <ThemeContext.Provider value={theme}>
      <GlobalStyles />
      <Board {...{ job, panels, frames, marks, theme }} />
    </ThemeContext.Provider>
  );
}

window.addEventListener('error', (event) => (window.FAILED = String(event.error?.stack ?? event.message)));
draw(window.JOB).then(
  () => requestAnimationFrame(() => setTimeout(() => (window.DRAWN = true), 300)),
  (error) => (window.FAILED = String(error.stack ?? error))
);
