//! Gated DeltaNet against the one-token-at-a-time recurrence in f64.

use ninfer_core::backend::InferenceBackend;
use ninfer_core::ops::{GdnFold, GdnMix, GdnParams, GdnRecord, GdnState, OutputGate};
use ninfer_core::segment::{Profile, Segment};
use ninfer_core::shape::GdnShape;
use ninfer_kernels::cpu::Cpu;

use super::close::{GOLDEN, close, close_by, same_bits};
use super::lab::{Lab, Mat};
use super::oracle::gdn::{Layer, Result as Expected, State, Token};
use super::oracle::wide;
use super::rng::Rng;

pub fn dims(key_heads: usize, value_heads: usize, key_dim: usize, value_dim: usize, conv_kernel: usize) -> GdnShape {
    GdnShape { key_heads, value_heads, key_dim, value_dim, conv_kernel }
}

/// Sizes with head ratios 1, 2 and 3, uneven dimensions and other kernels than 4.
pub fn sizes() -> Vec<GdnShape> {
    vec![
        dims(1, 1, 16, 16, 4),
        dims(2, 4, 32, 32, 4),
        dims(1, 3, 32, 48, 4),
        dims(2, 6, 24, 17, 4),
        dims(3, 3, 7, 5, 2),
        dims(1, 2, 16, 8, 3),
        dims(1, 2, 128, 128, 4),
    ]
}

/// Inputs of some rows.
#[derive(Clone, Default)]
pub struct Inputs {
    pub qkv: Vec<f32>,
    pub z: Vec<f32>,
    pub a: Vec<f32>,
    pub b: Vec<f32>,
}

impl Inputs {
    pub fn random(d: &GdnShape, rows: usize, rng: &mut Rng) -> Self {
        Self {
            qkv: rng.values(rows * d.channels(), 1.0),
            z: rng.values(rows * d.values(), 1.0),
            a: rng.values(rows * d.value_heads, 2.0),
            b: rng.values(rows * d.value_heads, 2.0),
        }
    }

    /// Rows from `source` at the given places, NaN elsewhere.
    pub fn placed(&self, d: &GdnShape, rows: usize, places: &[(usize, usize)]) -> Self {
        let place = |from: &[f32], width: usize| {
            let mut to = vec![f32::NAN; rows * width];
            for &(source, target) in places {
                to[target * width..][..width].copy_from_slice(&from[source * width..][..width]);
            }
            to
        };
        Self {
            qkv: place(&self.qkv, d.channels()),
            z: place(&self.z, d.values()),
            a: place(&self.a, d.value_heads),
            b: place(&self.b, d.value_heads),
        }
    }

    pub fn token(&self, d: &GdnShape, row: usize) -> Token<'_> {
        Token {
            qkv: &self.qkv[row * d.channels()..][..d.channels()],
            z: &self.z[row * d.values()..][..d.values()],
            a: &self.a[row * d.value_heads..][..d.value_heads],
            b: &self.b[row * d.value_heads..][..d.value_heads],
        }
    }
}

/// A layer in a backend with its state and record, all of which begin as poison.
pub struct Net<B: InferenceBackend = Cpu> {
    pub layer: Layer,
    pub params: GdnParams<B>,
    pub window: Mat<B>,
    pub matrix: Mat<B>,
    pub columns: Mat<B>,
    pub key_value: Mat<B>,
    pub gates: Mat<B>,
    pub width: usize,
}

impl Layer {
    pub fn random(d: GdnShape, rng: &mut Rng) -> Self {
        Self {
            dims: d,
            conv: rng.values(d.channels() * d.conv_kernel, 0.4),
            a_log: (0..d.value_heads).map(|_| rng.range(-3.0, 1.0)).collect(),
            dt_bias: rng.values(d.value_heads, 1.0),
            gain: (0..d.value_dim).map(|_| rng.range(0.5, 1.5)).collect(),
            eps: 1e-6,
            gate: OutputGate::Silu,
        }
    }
}

impl<B: InferenceBackend> Net<B> {
    pub fn new(lab: &mut Lab<B>, layer: Layer, slots: usize, width: usize) -> Self {
        let d = layer.dims;
        let params = GdnParams {
            dims: d,
            conv: lab.dense(d.channels(), d.conv_kernel, &layer.conv).v(),
            a_log: lab.dense(1, d.value_heads, &layer.a_log).v(),
            dt_bias: lab.dense(1, d.value_heads, &layer.dt_bias).v(),
            gain: lab.dense(1, d.value_dim, &layer.gain).v(),
            eps: layer.eps,
            gate: layer.gate,
        };
        let rows = slots * 2 * width;
        Self {
            layer,
            params,
            window: lab.poisoned::<f32>(slots * d.channels(), d.conv_kernel - 1),
            matrix: lab.poisoned::<f32>(slots * d.value_heads * d.key_dim, d.value_dim),
            columns: lab.poisoned::<f32>(rows, d.channels()),
            key_value: lab.poisoned::<f32>(rows, d.keys() + d.values()),
            gates: lab.poisoned::<f32>(rows, 2 * d.value_heads),
            width,
        }
    }

    pub fn state(&self) -> GdnState<B> {
        GdnState { window: self.window.v(), matrix: self.matrix.v() }
    }

    pub fn record(&self) -> GdnRecord<B> {
        GdnRecord { width: self.width, columns: self.columns.v(), key_value: self.key_value.v(), gates: self.gates.v() }
    }

    /// An operation over `rows` rows, and the matrix of its results.
    pub fn op(
        &self,
        lab: &mut Lab<B>,
        (profile, record): (Profile, bool),
        rows: usize,
        segments: &[Segment],
        inputs: &Inputs,
    ) -> (GdnMix<B>, Mat<B>) {
        let d = &self.layer.dims;
        let output = lab.output::<f32>(rows, d.values());
        let op = GdnMix {
            batch: lab.batch(profile, rows, segments),
            qkv: lab.input(rows, d.channels(), &inputs.qkv).v(),
            z: lab.input(rows, d.values(), &inputs.z).v(),
            a: lab.input(rows, d.value_heads, &inputs.a).v(),
            b: lab.input(rows, d.value_heads, &inputs.b).v(),
            params: self.params.clone(),
            state: self.state(),
            record: record.then(|| self.record()),
            output: output.v(),
        };
        (op, output)
    }

    /// A step with record.
    pub fn step(&self, lab: &mut Lab<B>, rows: usize, segments: &[Segment], inputs: &Inputs) -> Vec<f32> {
        let (op, output) = self.op(lab, (Profile::Step, true), rows, segments, inputs);
        lab.run(|r| r.gdn_mix(op));
        lab.read(&output)
    }

    /// A prompt chunk.
    pub fn prefill(&self, lab: &mut Lab<B>, rows: usize, segments: &[Segment], inputs: &Inputs) -> Vec<f32> {
        let (op, output) = self.op(lab, (Profile::Prefill, false), rows, segments, inputs);
        lab.run(|r| r.gdn_mix(op));
        lab.read(&output)
    }

    pub fn fold(&self, lab: &mut Lab<B>, segments: &[Segment]) {
        let batch = lab.batch(Profile::Step, 1, segments);
        let op = GdnFold { batch, params: self.params.clone(), state: self.state(), record: self.record() };
        lab.run(|r| r.gdn_fold(op));
    }

    /// Window and matrix of a slot.
    pub fn slot(&self, lab: &mut Lab<B>, slot: usize) -> (Vec<f32>, Vec<f32>) {
        let d = &self.layer.dims;
        let window = self.window.view.row_range(slot * d.channels()..(slot + 1) * d.channels()).unwrap();
        let rows = d.value_heads * d.key_dim;
        let matrix = self.matrix.view.row_range(slot * rows..(slot + 1) * rows).unwrap();
        (lab.read_view(&window), lab.read_view(&matrix))
    }

    /// Sets window and matrix of a slot.
    pub fn set_slot(&self, lab: &mut Lab<B>, slot: usize, window: &[f32], matrix: &[f32]) {
        let (mut windows, mut matrices) = (lab.read::<f32>(&self.window), lab.read::<f32>(&self.matrix));
        windows[slot * window.len()..][..window.len()].copy_from_slice(window);
        matrices[slot * matrix.len()..][..matrix.len()].copy_from_slice(matrix);
        lab.fill(&self.window, &windows);
        lab.fill(&self.matrix, &matrices);
    }
}

pub fn at(slot: u32, start: u32, row: u32, len: u32) -> Segment {
    Segment { slot, start, row, len, ..Segment::default() }
}

/// Runs the oracle over rows of `inputs`.
pub fn oracle(layer: &Layer, state: &mut State, inputs: &Inputs, rows: std::ops::Range<usize>) -> Vec<Expected> {
    rows.flat_map(|t| layer.token(state, &inputs.token(&layer.dims, t))).collect()
}

/// Compares results with the oracle. A read-out in f32 is off by some units of a state of size 6 or so, which the gated
/// norm multiplies; norm and gate add a few units of the result.
#[track_caller]
pub fn results_close(what: &str, got: &[f32], expected: &[Expected]) {
    let values: Vec<f64> = expected.iter().map(|r| r.value).collect();
    close_by(what, got, &values, |i| 2e-6 * expected[i].slope + 1e-6 * values[i].abs() + 1e-12);
}

#[track_caller]
pub fn state_close(what: &str, (window, matrix): &(Vec<f32>, Vec<f32>), state: &State, tolerance: f64) {
    close(&format!("{what}: window"), window, &state.window, 0.0);
    close(&format!("{what}: matrix"), matrix, &state.matrix, tolerance);
}

#[test]
fn prompt_chunks_match_the_sequential_oracle() {
    for d in sizes() {
        for rows in [1, 2, 3, 5, 17, 33, 63, 64, 65] {
            for gate in [OutputGate::Silu, OutputGate::Sigmoid] {
                let mut rng = Rng::new((rows + d.value_dim) as u64);
                let layer = Layer { gate, ..Layer::random(d, &mut rng) };
                let inputs = Inputs::random(&d, rows, &mut rng);
                let mut lab = Lab::cpu().with_gaps(2, 3);
                let net = Net::new(&mut lab, layer, 1, 1);
                let got = net.prefill(&mut lab, rows, &[at(0, 0, 0, rows as u32)], &inputs);
                let mut state = State::zero(&d);
                let what = format!("{d:?}, {rows} rows");
                results_close(&what, &got, &oracle(&net.layer, &mut state, &inputs, 0..rows));
                state_close(&what, &net.slot(&mut lab, 0), &state, GOLDEN);
            }
        }
    }
}

/// P01: results and state depend on the tokens alone, wherever a prompt is split, to the last bit.
#[test]
fn prompts_may_be_split_anywhere() {
    let d = dims(2, 4, 16, 24, 4);
    for rows in [1usize, 63, 64, 65, 127, 129] {
        let mut rng = Rng::new(rows as u64);
        let layer = Layer::random(d, &mut rng);
        let inputs = Inputs::random(&d, rows, &mut rng);
        let mut state = State::zero(&d);
        let expected = oracle(&layer, &mut state, &inputs, 0..rows);
        let mut lab = Lab::cpu();
        let net = Net::new(&mut lab, layer.clone(), 1, 1);
        let whole = net.prefill(&mut lab, rows, &[at(0, 0, 0, rows as u32)], &inputs);
        let end = net.slot(&mut lab, 0);
        results_close("whole", &whole, &expected);
        state_close("whole", &end, &state, GOLDEN);
        for split in (1..rows).filter(|s| rows < 70 || s % 5 == 0) {
            let mut lab = Lab::cpu();
            let net = Net::new(&mut lab, layer.clone(), 1, 1);
            let mut parts = Vec::new();
            for range in [0..split, split..rows] {
                let places: Vec<_> = range.clone().zip(0..).collect();
                let chunk = inputs.placed(&d, range.len(), &places);
                parts.extend(net.prefill(
                    &mut lab,
                    range.len(),
                    &[at(0, range.start as u32, 0, range.len() as u32)],
                    &chunk,
                ));
            }
            same_bits(&format!("split at {split} of {rows}"), &parts, &whole);
            assert_eq!(net.slot(&mut lab, 0), end, "split at {split} of {rows}");
        }
    }
}

/// Several sequences in one call, padding rows of NaN between them, slots in any order; other slots stay as they are.
#[test]
fn segments_use_their_own_slot() {
    for (profile, record) in [(Profile::Prefill, false), (Profile::Step, true)] {
        let d = dims(1, 2, 16, 24, 4);
        let mut rng = Rng::new(5);
        let layer = Layer::random(d, &mut rng);
        let inputs = Inputs::random(&d, 8, &mut rng);
        let old = Inputs::random(&d, 3, &mut rng);
        let mut lab = Lab::cpu();
        let net = Net::new(&mut lab, layer, 4, 5);
        // Slot 3 has seen three tokens already.
        net.prefill(&mut lab, 3, &[at(3, 0, 0, 3)], &old);
        let mut state = State::zero(&d);
        oracle(&net.layer, &mut state, &old, 0..3);
        let before = net.slot(&mut lab, 3);
        // Rows 1..6 are five tokens of slot 3, rows 8..11 three of slot 0, and an empty segment names slot 1.
        let places: Vec<(usize, usize)> = (0..5).map(|i| (i, i + 1)).chain((5..8).map(|i| (i, i + 3))).collect();
        let call = inputs.placed(&d, 12, &places);
        let segments = [at(3, 3, 1, 5), at(1, 9, 400, 0), at(0, 0, 8, 3)];
        let (op, output) = net.op(&mut lab, (profile, record), 12, &segments, &call);
        lab.run(|r| r.gdn_mix(op));
        let got = lab.read::<f32>(&output);
        let width = d.values();
        results_close("slot 3", &got[width..6 * width], &oracle(&net.layer, &mut state, &inputs, 0..5));
        let mut fresh = State::zero(&d);
        results_close("slot 0", &got[8 * width..11 * width], &oracle(&net.layer, &mut fresh, &inputs, 5..8));
        if record {
            assert_eq!(net.slot(&mut lab, 3), before);
        } else {
            state_close("slot 3", &net.slot(&mut lab, 3), &state, GOLDEN);
            state_close("slot 0", &net.slot(&mut lab, 0), &fresh, GOLDEN);
        }
        for slot in [1, 2] {
            let (window, matrix) = net.slot(&mut lab, slot);
            assert!(window.iter().chain(&matrix).all(|x| x.is_nan()), "slot {slot} was touched");
        }
    }
}

/// What a step records: raw columns, convolved keys and values, gates.
#[test]
fn records_hold_what_a_fold_needs() {
    let d = dims(2, 4, 16, 8, 4);
    let mut rng = Rng::new(9);
    let layer = Layer::random(d, &mut rng);
    let inputs = Inputs::random(&d, 4, &mut rng);
    let mut lab = Lab::cpu();
    let net = Net::new(&mut lab, layer, 2, 6);
    net.step(&mut lab, 4, &[Segment { bank: 1, ..at(1, 0, 0, 4) }], &inputs);
    let (columns, kv, gates) =
        (lab.read::<f32>(&net.columns), lab.read::<f32>(&net.key_value), lab.read::<f32>(&net.gates));
    let first = (2 + 1) * 6;
    let mut window = State::zero(&d).window;
    for t in 0..4 {
        let (row, token) = (first + t, inputs.token(&d, t));
        same_bits("columns", &columns[row * d.channels()..][..d.channels()], token.qkv);
        let y = net.layer.convolve(&mut window, token.qkv);
        let width = d.keys() + d.values();
        close("keys and values", &kv[row * width..][..width], &y[d.keys()..], GOLDEN);
        let (g, beta) = net.layer.gates(token.a, token.b);
        close("log decay", &gates[row * 8..][..4], &g, 1e-5);
        close("beta", &gates[row * 8 + 4..][..4], &beta, 1e-6);
    }
    let untouched = |x: &[f32], width: usize| {
        x.chunks(width).enumerate().all(|(r, row)| (first..first + 4).contains(&r) || row.iter().all(|x| x.is_nan()))
    };
    assert!(untouched(&columns, d.channels()) && untouched(&kv, d.keys() + d.values()) && untouched(&gates, 8));
}

/// A step with a state far from zero agrees with the oracle.
#[test]
fn steps_match_the_oracle_from_any_state() {
    for d in sizes() {
        for rows in [1, 2, 3, 4, 5, 16] {
            let mut rng = Rng::new((rows * 31 + d.key_dim) as u64);
            let layer = Layer::random(d, &mut rng);
            let inputs = Inputs::random(&d, rows, &mut rng);
            let (window, matrix) =
                (rng.values(d.channels() * (d.conv_kernel - 1), 1.0), rng.values(d.values() * d.key_dim, 1.0));
            let mut state = State { window: wide(&window), matrix: wide(&matrix) };
            let mut lab = Lab::cpu();
            let net = Net::new(&mut lab, layer, 2, 16);
            net.set_slot(&mut lab, 1, &window, &matrix);
            let got = net.step(&mut lab, rows, &[at(1, 50, 0, rows as u32)], &inputs);
            results_close(&format!("{d:?}"), &got, &oracle(&net.layer, &mut state, &inputs, 0..rows));
            assert_eq!(net.slot(&mut lab, 1), (window, matrix), "a step leaves its state alone");
        }
    }
}
