//! Gated DeltaNet: the token mixer with its state, record and fold.

use std::ops::Range;

use ninfer_core::ops::{GdnFold, GdnMix, GdnParams, GdnRecord, GdnState, OutputGate};
use ninfer_core::segment::Segment;
use ninfer_core::shape::GdnShape;
use ninfer_core::{Error, Result};

use super::Cpu;
use super::buffer::Access;
use super::delta::{delta_step, gated_norm, gates, l2_normalise};
use super::matmul::Input;
use super::norm::sigmoid;
use super::parallel::{Shared, split};
use super::queue::Scratch;
use super::rows::Rows;
use super::simd::Isa;

/// Epsilon of the l2 norm of queries and keys, fixed by the model.
const L2_EPS: f32 = 1e-6;

/// Small parameters as slices.
struct Params<'a> {
    dims: GdnShape,
    conv: &'a [f32],
    a_log: &'a [f32],
    dt_bias: &'a [f32],
    gain: &'a [f32],
    eps: f32,
    gate: OutputGate,
}

impl<'a> Params<'a> {
    fn read(access: &'a Access, p: &GdnParams<Cpu>) -> Result<Self> {
        Ok(Self {
            dims: p.dims,
            conv: access.read_dense("conv", &p.conv)?,
            a_log: access.read("a_log", &p.a_log)?,
            dt_bias: access.read("dt_bias", &p.dt_bias)?,
            gain: access.read("gain", &p.gain)?,
            eps: p.eps,
            gate: p.gate,
        })
    }
}

/// Sizes without an empty dimension.
fn check_dims(op: &'static str, d: &GdnShape) -> Result<()> {
    let least = [d.key_heads, d.value_heads, d.key_dim, d.value_dim, d.conv_kernel.saturating_sub(1)];
    if least.contains(&0) {
        return Err(Error::Shape {
            op,
            what: "sizes",
            expected: "at least one head of one feature and two taps".to_owned(),
            got: format!("{d:?}"),
        });
    }
    Ok(())
}

/// State of all slots as slices.
struct State<'a> {
    window: &'a mut [f32],
    matrix: &'a mut [f32],
    slots: usize,
}

impl<'a> State<'a> {
    fn write(access: &'a Access, s: &GdnState<Cpu>, d: &GdnShape) -> Result<Self> {
        Ok(Self {
            window: access.write_dense("window", &s.window)?,
            matrix: access.write_dense("matrix", &s.matrix)?,
            slots: s.window.rows() / d.channels(),
        })
    }

    fn check(&self, segment: &Segment) -> Result<()> {
        if (segment.slot as usize) < self.slots {
            return Ok(());
        }
        Err(Error::OutOfRange {
            what: "sequence slot",
            got: segment.slot.to_string(),
            legal: format!("below {}", self.slots),
        })
    }

    /// Window and matrix of a checked segment's slot; zeros where the state belongs to position 0.
    fn slot(&mut self, d: &GdnShape, segment: &Segment) -> (&mut [f32], &mut [f32]) {
        let (w, m) = (d.channels() * (d.conv_kernel - 1), d.values() * d.key_dim);
        let slot = segment.slot as usize;
        let window = &mut self.window[slot * w..][..w];
        let matrix = &mut self.matrix[slot * m..][..m];
        if segment.base() == 0 {
            window.fill(0.0);
            matrix.fill(0.0);
        }
        (window, matrix)
    }
}

/// Record of all slots as slices.
struct Record<'a> {
    width: usize,
    rows: usize,
    columns: &'a mut [f32],
    key_value: &'a mut [f32],
    gates: &'a mut [f32],
}

impl<'a> Record<'a> {
    fn write(access: &'a Access, r: &GdnRecord<Cpu>) -> Result<Self> {
        Ok(Self {
            width: r.width,
            rows: r.columns.rows(),
            columns: access.write_dense("record columns", &r.columns)?,
            key_value: access.write_dense("record keys and values", &r.key_value)?,
            gates: access.write_dense("record gates", &r.gates)?,
        })
    }

    /// Rows of the columns that a segment folds.
    fn folded(&self, segment: &Segment) -> Result<Range<usize>> {
        self.columns_of("folded columns", segment.slot, 1 - segment.bank.min(1), segment.fold)
    }

    /// Rows of the columns that a segment records.
    fn recorded(&self, segment: &Segment) -> Result<Range<usize>> {
        self.columns_of("recorded columns", segment.slot, segment.bank.min(1), segment.len)
    }

    fn columns_of(&self, what: &'static str, slot: u32, bank: u32, count: u32) -> Result<Range<usize>> {
        let count = count as usize;
        let first = (slot as usize * 2 + bank as usize).saturating_mul(self.width);
        if count > self.width || first.saturating_add(self.width) > self.rows {
            let slots = self.rows / self.width.saturating_mul(2).max(1);
            return Err(Error::OutOfRange {
                what,
                got: format!("{count} of slot {slot}"),
                legal: format!("at most {} of a slot below {slots}", self.width),
            });
        }
        Ok(first..first + count)
    }
}

/// Folds the recorded columns `rows` into the state of one slot, with the arithmetic of the pass that recorded them.
fn fold_slot(
    isa: Isa,
    d: &GdnShape,
    record: &Record<'_>,
    rows: Range<usize>,
    (window, matrix): (&mut [f32], &mut [f32]),
    scratch: &mut [f32],
) {
    if rows.is_empty() {
        return;
    }
    let (count, keys, hv) = (rows.len(), d.keys(), d.value_heads);
    let kv_width = keys + d.values();
    let (normed, u) = scratch.split_at_mut(count * keys);
    for (i, row) in rows.clone().enumerate() {
        for h in 0..d.key_heads {
            let at = h * d.key_dim..(h + 1) * d.key_dim;
            let key = &record.key_value[row * kv_width..][at.clone()];
            normed[i * keys..][at.clone()].copy_from_slice(key);
            l2_normalise(isa, &mut normed[i * keys..][at], L2_EPS, 1.0);
        }
    }
    let (matrix, u, normed) = (Shared::new(matrix), Shared::new(u), &*normed);
    let size = d.key_dim * d.value_dim;
    split(hv, 1, 2 * hv * size * count, &|heads| {
        for h in heads {
            // SAFETY: each head owns its own matrix and part of `u`.
            let (s, u) =
                unsafe { (matrix.range(h * size..(h + 1) * size), u.range(h * d.value_dim..(h + 1) * d.value_dim)) };
            let kh = h / (hv / d.key_heads);
            for (i, row) in rows.clone().enumerate() {
                let k = &normed[i * keys + kh * d.key_dim..][..d.key_dim];
                let v = &record.key_value[row * kv_width + keys + h * d.value_dim..][..d.value_dim];
                let (g, beta) = (record.gates[row * 2 * hv + h], record.gates[row * 2 * hv + hv + h]);
                delta_step(isa, s, k, v, [g, beta], u, None);
            }
        }
    });
    let columns = Input::new(&record.columns[rows.start * d.channels()..], d.channels());
    shift_window(d, window, columns, count);
}

/// Moves the window behind the last of `count` columns.
fn shift_window(d: &GdnShape, window: &mut [f32], columns: Input<'_>, count: usize) {
    let keep = d.conv_kernel - 1;
    for (c, window) in window.chunks_exact_mut(keep).enumerate() {
        for j in 0..keep {
            // Column j of the new window is column j + count of (window ++ columns).
            let from = j + count;
            window[j] = if from < keep { window[from] } else { columns.data[(from - keep) * columns.stride + c] };
        }
    }
}

/// `y = silu(Σ_j w_j · x_{t−K+1+j})` for column `t`; columns before the first come from the window.
fn convolve(d: &GdnShape, weight: &[f32], window: &[f32], columns: Input<'_>, t: usize, out: &mut [f32]) {
    let (keep, kernel) = (d.conv_kernel - 1, d.conv_kernel);
    for (c, out) in out.iter_mut().enumerate() {
        let w = &weight[c * kernel..][..kernel];
        let mut sum = 0.0;
        for (j, w) in w.iter().enumerate() {
            let from = t + j; // in (window ++ columns)
            let x =
                if from < keep { window[c * keep + from] } else { columns.data[(from - keep) * columns.stride + c] };
            sum += w * x;
        }
        *out = sum * sigmoid(sum);
    }
}

pub(super) fn fold(op: &GdnFold<Cpu>, isa: Isa, scratch: &mut Scratch) -> Result<()> {
    let access = Access::new("gdn_fold");
    let rows = Rows::read(&access, "gdn_fold", &op.batch)?;
    let d = op.params.dims;
    check_dims("gdn_fold", &d)?;
    let mut state = State::write(&access, &op.state, &d)?;
    let record = Record::write(&access, &op.record)?;
    // Everything is checked before anything is written, so that an error leaves all states as they were.
    let folding = || rows.segments().iter().filter(|s| s.fold > 0);
    for segment in folding() {
        state.check(segment)?;
        record.folded(segment)?;
    }
    for segment in folding() {
        let from = record.folded(segment)?;
        let [work] = scratch.floats.get([from.len() * d.keys() + d.values()])?;
        fold_slot(isa, &d, &record, from, state.slot(&d, segment), work);
    }
    Ok(())
}

pub(super) fn mix(op: &GdnMix<Cpu>, isa: Isa, scratch: &mut Scratch) -> Result<()> {
    let access = Access::new("gdn_mix");
    let rows = Rows::read(&access, "gdn_mix", &op.batch)?;
    check_dims("gdn_mix", &op.params.dims)?;
    let p = Params::read(&access, &op.params)?;
    let inputs = Inputs {
        qkv: Input::new(access.read("qkv", &op.qkv)?, op.qkv.stride()),
        z: Input::new(access.read("z", &op.z)?, op.z.stride()),
        a: Input::new(access.read("a", &op.a)?, op.a.stride()),
        b: Input::new(access.read("b", &op.b)?, op.b.stride()),
    };
    let mut state = State::write(&access, &op.state, &p.dims)?;
    let mut record = op.record.as_ref().map(|r| Record::write(&access, r)).transpose()?;
    let output = Shared::new(access.write_matrix("output", &op.output, rows.count, p.dims.values())?);
    let out_stride = op.output.stride();
    // Everything is checked before anything is written, so that an error leaves all states as they were.
    let live = || rows.segments().iter().filter(|s| s.len > 0);
    for segment in live() {
        state.check(segment)?;
        match &record {
            Some(record) => {
                record.folded(segment)?;
                record.recorded(segment)?;
            }
            None if segment.fold > 0 => {
                return Err(Error::OutOfRange {
                    what: "fold of a segment",
                    got: segment.fold.to_string(),
                    legal: "0 without a record".to_owned(),
                });
            }
            None => {}
        }
    }
    for segment in live() {
        mix_segment(isa, &p, &inputs, segment, &mut state, record.as_mut(), (output, out_stride), scratch)?;
    }
    Ok(())
}

struct Inputs<'a> {
    qkv: Input<'a>,
    z: Input<'a>,
    a: Input<'a>,
    b: Input<'a>,
}

#[allow(clippy::too_many_arguments)]
fn mix_segment(
    isa: Isa,
    p: &Params<'_>,
    inputs: &Inputs<'_>,
    segment: &Segment,
    state: &mut State<'_>,
    record: Option<&mut Record<'_>>,
    (output, out_stride): (Shared<f32>, usize),
    scratch: &mut Scratch,
) -> Result<()> {
    let d = &p.dims;
    let (len, row0, hv) = (segment.len as usize, segment.row as usize, d.value_heads);
    let (channels, keys, size) = (d.channels(), d.keys(), d.key_dim * d.value_dim);
    let stepping = record.is_some();
    let from = record.as_ref().map_or(Ok(0..0), |r| r.folded(segment))?;
    let copy = if stepping { d.values() * d.key_dim } else { 0 };
    let [work, conv, gate, u, local] =
        scratch.floats.get([from.len() * keys + d.values(), len * channels, len * 2 * hv, d.values(), copy])?;
    let (window, matrix) = state.slot(d, segment);
    if let Some(record) = &record {
        fold_slot(isa, d, record, from, (&mut *window, &mut *matrix), work);
    }

    // Convolution and gates of all rows.
    let columns = Input::new(&inputs.qkv.data[row0 * inputs.qkv.stride..], inputs.qkv.stride);
    let shared = Shared::new(&mut *conv);
    let frozen = &*window;
    split(len, 1, len * channels * 16, &|range| {
        for t in range {
            // SAFETY: each row owns its own part of the scratch.
            let out = unsafe { shared.range(t * channels..(t + 1) * channels) };
            convolve(d, p.conv, frozen, columns, t, out);
        }
    });
    for t in 0..len {
        let (a, b) = (&inputs.a.data[(row0 + t) * inputs.a.stride..], &inputs.b.data[(row0 + t) * inputs.b.stride..]);
        let (g, beta) = gate[t * 2 * hv..][..2 * hv].split_at_mut(hv);
        gates(&a[..hv], &b[..hv], p.a_log, p.dt_bias, (g, beta));
    }
    if let Some(record) = record {
        let to = record.recorded(segment)?;
        let kv_width = keys + d.values();
        for (t, row) in to.enumerate() {
            let raw = &columns.data[t * columns.stride..][..channels];
            record.columns[row * channels..][..channels].copy_from_slice(raw);
            let kv = &conv[t * channels + keys..][..kv_width];
            record.key_value[row * kv_width..][..kv_width].copy_from_slice(kv);
            record.gates[row * 2 * hv..][..2 * hv].copy_from_slice(&gate[t * 2 * hv..][..2 * hv]);
        }
    } else {
        shift_window(d, window, columns, len);
    }
    let query_scale = 1.0 / (d.key_dim as f32).sqrt();
    for row in conv.chunks_exact_mut(channels) {
        for h in 0..2 * d.key_heads {
            let scale = if h < d.key_heads { query_scale } else { 1.0 };
            l2_normalise(isa, &mut row[h * d.key_dim..(h + 1) * d.key_dim], L2_EPS, scale);
        }
    }

    // Delta rule and gated norm, one value head at a time.
    let (matrix, local, u) = (Shared::new(matrix), Shared::new(local), Shared::new(u));
    let (conv, gate) = (&*conv, &*gate);
    split(hv, 1, 3 * hv * size * len, &|heads| {
        for h in heads {
            let own = h * size..(h + 1) * size;
            // SAFETY: each head owns its own matrix, copy and part of `u`.
            let (s, u) = unsafe {
                let s = matrix.range(own.clone());
                let s = if stepping {
                    let copy = local.range(own);
                    copy.copy_from_slice(s);
                    copy
                } else {
                    s
                };
                (s, u.range(h * d.value_dim..(h + 1) * d.value_dim))
            };
            let kh = h / (hv / d.key_heads);
            for t in 0..len {
                let row = &conv[t * channels..][..channels];
                let q = &row[kh * d.key_dim..][..d.key_dim];
                let k = &row[keys + kh * d.key_dim..][..d.key_dim];
                let v = &row[2 * keys + h * d.value_dim..][..d.value_dim];
                let at = (row0 + t) * out_stride + h * d.value_dim;
                // SAFETY: each head owns its own columns of the output, whose rows are at least `Hv · dv` elements apart.
                let out = unsafe { output.range(at..at + d.value_dim) };
                delta_step(isa, s, k, v, [gate[t * 2 * hv + h], gate[t * 2 * hv + hv + h]], u, Some((q, &mut *out)));
                let z = &inputs.z.data[(row0 + t) * inputs.z.stride + h * d.value_dim..][..d.value_dim];
                gated_norm(isa, out, z, p.gain, p.eps, p.gate);
            }
        }
    });
    Ok(())
}
