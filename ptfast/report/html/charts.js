// Lets the curves of a report be drawn over steps, epochs or time, and smoothed.
(() => {
  const controls = document.getElementById("controls");
  const [left, right, bottom] = JSON.parse(controls.dataset.box);
  const lastStep = +controls.dataset.last;
  const knots = JSON.parse(controls.dataset.knots); // rows of step, epoch, seconds of training
  const axes = ["step", "epoch", "training time"];
  const leastPoints = 20; // shorter curves are not smoothed
  const charts = [...document.querySelectorAll("figure.curve svg")].map((svg) => ({
    x: svg.querySelector(".x"),
    exact: svg.closest(".exact") !== null,
    lines: [...svg.querySelectorAll("g[class^=c]")].map((group) => {
      const path = group.querySelector(".line"), marks = [...group.querySelectorAll("circle")];
      const places = path
        ? [...path.getAttribute("d").matchAll(/([\d.]+) ([\d.]+)/g)].map((m) => [+m[1], +m[2]])
        : marks.map((mark) => [+mark.getAttribute("cx"), +mark.getAttribute("cy")]);
      const points = places.map(([x, y]) => [((x - left) / (right - left)) * lastStep, y]);
      return { path, marks, points, raw: path && path.parentNode.insertBefore(path.cloneNode(), path) };
    }),
  }));

  const value = (step, axis) => {
    if (axis === 0) return step;
    let before = [0, 0, 0];
    for (const knot of knots) {
      if (knot[0] >= step) {
        const share = (step - before[0]) / (knot[0] - before[0] || 1);
        return before[axis] + share * (knot[axis] - before[axis]);
      }
      before = knot;
    }
    return before[axis];
  };

  const ticks = (last, axis) => {
    const [unit, name] = axis < 2 ? [1, ""] : last < 120 ? [1, "s"] : last < 7200 ? [60, "m"] : [3600, "h"];
    const most = last / unit, power = 10 ** Math.floor(Math.log10(most / 6 || 1));
    let spacing = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((size) => size >= most / 6);
    if (axis === 0) spacing = Math.max(1, Math.ceil(spacing));
    const count = Math.floor(most / spacing + 1e-9);
    return Array.from({ length: count + 1 }, (_, i) => [i * spacing * unit, (+(i * spacing).toFixed(6)).toLocaleString("en") + name]);
  };

  const smoothed = (points, weight) => {
    let mean = 0, sum = 0;
    return points.map(([step, y]) => {
      mean = weight * mean + (1 - weight) * y;
      sum = weight * sum + 1 - weight;
      return [step, mean / sum];
    });
  };

  const draw = () => {
    const axis = +controls.elements.axis.value, weight = +controls.elements.smoothing.value;
    const last = value(lastStep, axis) || 1;
    const place = (step) => (left + (value(step, axis) / last) * (right - left)).toFixed(1);
    const shape = (points) => "M" + points.map(([step, y]) => `${place(step)} ${y.toFixed(1)}`).join("L");
    const labels = ticks(last, axis).map(([at, text]) => {
      const x = (left + (at / last) * (right - left)).toFixed(1);
      return `<path class="axis" d="M${x} ${bottom}v4"/><text x="${x}" y="${bottom + 17}" text-anchor="middle">${text}</text>`;
    });
    for (const { x, exact, lines } of charts) {
      x.innerHTML = labels.join("") + `<text x="${(left + right) / 2}" y="${bottom + 34}" text-anchor="middle">${axes[axis]}</text>`;
      for (const { path, marks, points, raw } of lines) {
        marks.forEach((mark, i) => mark.setAttribute("cx", place(points[i][0])));
        if (!path) continue;
        const smooths = weight > 0 && !exact && points.length >= leastPoints;
        path.setAttribute("d", shape(smooths ? smoothed(points, weight) : points));
        raw.setAttribute("d", shape(points));
        raw.classList.toggle("raw", smooths);
      }
    }
  };
  controls.addEventListener("input", draw);
  controls.hidden = false;
})();
