// Draws the plots of a report in the colours of its style sheet, and again when those change.
"use strict";

(() => {
  const plots = JSON.parse(document.getElementById("plots").textContent);

  const options = {
    // Where there is no pointer to hover with, the bar would lie over the legend for ever.
    displayModeBar: matchMedia("(hover: hover)").matches ? "hover" : false,
    displaylogo: false,
    responsive: true,
    showSendToCloud: false,
    plotlyServerURL: "",
    modeBarButtonsToRemove: ["select2d", "lasso2d", "zoomIn2d", "zoomOut2d", "autoScale2d"],
  };

  const rgb = (text) => [1, 3, 5].map((at) => parseInt(text.slice(at, at + 2), 16));

  // "var(--name)" and "mix(--one, --other, share)" as a colour.
  function paint(text, style) {
    const named = (name) => style.getPropertyValue(name).trim();
    const one = /^var\((--[\w-]+)\)$/.exec(text);
    if (one) return named(one[1]);
    const two = /^mix\((--[\w-]+), (--[\w-]+), ([\d.]+)\)$/.exec(text);
    if (!two) return text;
    const [first, last] = [rgb(named(two[1])), rgb(named(two[2]))];
    const share = Number(two[3]);
    return `rgb(${first.map((from, at) => Math.round(from + (last[at] - from) * share)).join()})`;
  }

  // A copy with every colour painted. Only members that are colours are looked at.
  function painted(value, style, isColour = false) {
    if (typeof value === "string") return isColour ? paint(value, style) : value;
    if (Array.isArray(value)) return value.map((member) => painted(member, style, isColour));
    if (value === null || typeof value !== "object") return value;
    return Object.fromEntries(Object.entries(value).map(
      ([name, member]) => [name, painted(member, style, /colou?r(scale)?$/i.test(name))]));
  }

  const axis = {
    automargin: true,
    gridcolor: "var(--grid)",
    linecolor: "var(--line)",
    zeroline: false,
    ticks: "",
    title: { standoff: 8, font: { size: 13, color: "var(--quiet)" } },
    tickfont: { color: "var(--quiet)" },
  };

  function merged(base, over) {
    const isObject = (value) => value && typeof value === "object" && !Array.isArray(value);
    const all = { ...base };
    for (const [name, member] of Object.entries(over)) {
      all[name] = isObject(member) && isObject(base[name]) ? merged(base[name], member) : member;
    }
    return all;
  }

  const layout = {
    autosize: true,
    margin: { l: 8, r: 8, t: 8, b: 8 },
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { size: 13, color: "var(--ink)", family: getComputedStyle(document.body).fontFamily },
    // On a touch screen a finger that crosses a plot scrolls the page.
    dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom",
    hovermode: "closest",
    hoverlabel: {
      align: "left",
      bgcolor: "var(--card)",
      bordercolor: "var(--line)",
      font: { size: 13, color: "var(--ink)" },
    },
    legend: { orientation: "h", x: 0, xanchor: "left", y: 1.02, yanchor: "bottom" },
    modebar: { bgcolor: "rgba(0,0,0,0)", color: "var(--quiet)", activecolor: "var(--ink)" },
  };

  // The layout of a plot over what all have.
  function complete(own) {
    const axes = Object.keys(own).filter((name) => /^[xy]axis\d*$/.test(name));
    return merged({ ...layout, ...Object.fromEntries(axes.map((name) => [name, axis])) }, own);
  }

  function draw() {
    const style = getComputedStyle(document.documentElement);
    for (const [name, plot] of Object.entries(plots)) {
      const whole = painted(complete(plot.layout), style);
      Plotly.react(name, painted(plot.data, style), whole, options);
    }
  }

  draw();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
})();
