//! Gated DeltaNet: against the CPU backend, and to the last bit against itself.

use ninfer_core::ops::{GdnFold, GdnMix, GdnOps, GdnParams, GdnRecord, GdnState, OutputGate};
use ninfer_core::segment::{Profile, Segment};
use ninfer_core::shape::GdnShape;
use ninfer_core::{Backend, DType, View};

use super::lab::{Side, Tolerance, exact, gpu, near, same};
use super::rng::Rng;

/// Results of prompts: one rounding to bf16, behind a norm that may magnify what is left of a read-out.
pub const PROMPT: Tolerance = Tolerance { l2: 4.1e-3, absolute: 5e-6, relative: 5.5e-3 };
/// States of prompts: f32 in another order of sums.
pub const STATE: Tolerance = Tolerance { l2: 2e-5, absolute: 1e-5, relative: 2e-5 };
/// States of prompts in chunks: the operands of every product are rounded to f16, half a unit of which is 2^-11 of them.
pub const CHUNK_STATE: Tolerance = Tolerance { l2: 1e-3, absolute: 1e-5, relative: 2e-3 };
/// Results of rounds: keys and values are recorded in bf16, and the result is rounded again.
pub const ROUND: Tolerance = Tolerance { l2: 1e-2, absolute: 1e-4, relative: 2e-2 };
/// States of rounds: two factors of each update are rounded to bf16.
pub const FOLDED: Tolerance = Tolerance { l2: 4e-3, absolute: 1e-4, relative: 1e-2 };

pub fn dims(key_heads: usize, value_heads: usize, key_dim: usize, value_dim: usize, conv_kernel: usize) -> GdnShape {
    GdnShape { key_heads, value_heads, key_dim, value_dim, conv_kernel }
}

/// Sizes of every kernel: head ratios 1, 2 and 3, uneven dimensions, other taps than 4, and the largest that are taken.
pub fn sizes() -> Vec<GdnShape> {
    vec![
        dims(1, 1, 16, 16, 4),
        dims(2, 4, 32, 32, 4),
        dims(1, 3, 32, 48, 4),
        dims(2, 6, 24, 17, 4),
        dims(3, 3, 7, 5, 2),
        dims(1, 2, 16, 8, 3),
        dims(2, 2, 128, 128, 4),
        dims(1, 2, 128, 128, 4),
        dims(2, 6, 128, 128, 4),
        dims(1, 4, 128, 128, 4),
        dims(1, 2, 128, 128, 3),
        dims(1, 2, 128, 100, 4),
        dims(1, 2, 100, 36, 5),
        dims(1, 1, 256, 256, 8),
    ]
}

#[derive(Clone)]
pub struct Layer {
    pub dims: GdnShape,
    pub conv: Vec<f32>,
    pub a_log: Vec<f32>,
    pub dt_bias: Vec<f32>,
    pub gain: Vec<f32>,
    pub gate: OutputGate,
}

impl Layer {
    pub fn random(d: GdnShape, rng: &mut Rng) -> Self {
        Self {
            dims: d,
            conv: rng.values(d.channels() * d.conv_kernel, 0.4),
            a_log: (0..d.value_heads).map(|_| rng.range(-3.0, 1.0)).collect(),
            dt_bias: rng.values(d.value_heads, 1.0),
            gain: (0..d.value_dim).map(|_| rng.range(0.5, 1.5)).collect(),
            gate: OutputGate::Silu,
        }
    }
}

/// Inputs of some rows, as activations hold them exactly.
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
            qkv: exact(rng.values(rows * d.channels(), 1.0)),
            z: exact(rng.values(rows * d.values(), 1.0)),
            a: exact(rng.values(rows * d.value_heads, 2.0)),
            b: exact(rng.values(rows * d.value_heads, 2.0)),
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

    pub fn range(&self, d: &GdnShape, rows: std::ops::Range<usize>) -> Self {
        let places: Vec<_> = rows.clone().zip(0..).collect();
        self.placed(d, rows.len(), &places)
    }
}

/// Views of the inputs of a call.
pub struct Call<B: Backend> {
    pub qkv: View<B>,
    pub z: View<B>,
    pub a: View<B>,
    pub b: View<B>,
    pub output: View<B>,
}

/// A layer in a backend with its state and record, all of which begin as poison.
pub struct Net<B: GdnOps> {
    pub side: Side<B>,
    pub params: GdnParams<B>,
    pub state: GdnState<B>,
    pub record: GdnRecord<B>,
}

impl<B: GdnOps> Net<B> {
    pub fn new(backend: B, layer: &Layer, slots: usize, width: usize) -> Self {
        let (mut side, d) = (Side::new(backend), layer.dims);
        let act = side.backend.activation_dtype();
        let params = GdnParams {
            dims: d,
            conv: side.floats(d.channels(), d.conv_kernel, &layer.conv),
            a_log: side.floats(1, d.value_heads, &layer.a_log),
            dt_bias: side.floats(1, d.value_heads, &layer.dt_bias),
            gain: side.floats(1, d.value_dim, &layer.gain),
            eps: 1e-6,
            gate: layer.gate,
        };
        let rows = slots * 2 * width;
        let state = GdnState {
            window: side.poisoned(act, slots * d.channels(), d.conv_kernel - 1),
            matrix: side.poisoned(DType::F32, slots * d.value_heads * d.key_dim, d.value_dim),
        };
        let record = GdnRecord {
            width,
            columns: side.poisoned(act, rows, d.channels()),
            key_value: side.poisoned(act, rows, d.keys() + d.values()),
            gates: side.poisoned(DType::F32, rows, 2 * d.value_heads),
        };
        Self { side, params, state, record }
    }

    pub fn dims(&self) -> GdnShape {
        self.params.dims
    }

    pub fn call(&mut self, rows: usize, inputs: &Inputs) -> Call<B> {
        let (d, side) = (self.dims(), &mut self.side);
        Call {
            qkv: side.acts(rows, d.channels(), &inputs.qkv),
            z: side.acts(rows, d.values(), &inputs.z),
            a: side.acts(rows, d.value_heads, &inputs.a),
            b: side.acts(rows, d.value_heads, &inputs.b),
            output: side.result(rows, d.values()),
        }
    }

    pub fn op(&mut self, call: &Call<B>, profile: Profile, segments: &[Segment]) -> GdnMix<B> {
        GdnMix {
            batch: self.side.batch(profile, call.output.rows(), segments),
            qkv: call.qkv.clone(),
            z: call.z.clone(),
            a: call.a.clone(),
            b: call.b.clone(),
            params: self.params.clone(),
            state: self.state.clone(),
            record: (profile == Profile::Step).then(|| self.record.clone()),
            output: call.output.clone(),
        }
    }

    fn mix(&mut self, profile: Profile, rows: usize, segments: &[Segment], inputs: &Inputs) -> Vec<f32> {
        let call = self.call(rows, inputs);
        let op = self.op(&call, profile, segments);
        self.side.run(|r| r.gdn_mix(op));
        let values = self.side.values(&call.output);
        self.side.check_guards();
        values
    }

    /// A step with record.
    pub fn step(&mut self, rows: usize, segments: &[Segment], inputs: &Inputs) -> Vec<f32> {
        self.mix(Profile::Step, rows, segments, inputs)
    }

    /// A prompt chunk.
    pub fn prefill(&mut self, rows: usize, segments: &[Segment], inputs: &Inputs) -> Vec<f32> {
        self.mix(Profile::Prefill, rows, segments, inputs)
    }

    pub fn fold_op(&mut self, rows: usize, segments: &[Segment]) -> GdnFold<B> {
        GdnFold {
            batch: self.side.batch(Profile::Step, rows, segments),
            params: self.params.clone(),
            state: self.state.clone(),
            record: self.record.clone(),
        }
    }

    pub fn fold(&mut self, segments: &[Segment]) {
        let op = self.fold_op(1, segments);
        self.side.run(|r| r.gdn_fold(op));
        self.side.check_guards();
    }

    fn of_slot(&self, slot: usize) -> (View<B>, View<B>) {
        let (d, rows) = (self.dims(), self.dims().value_heads * self.dims().key_dim);
        let window = self.state.window.row_range(slot * d.channels()..(slot + 1) * d.channels()).unwrap();
        (window, self.state.matrix.row_range(slot * rows..(slot + 1) * rows).unwrap())
    }

    /// Window and matrix of a slot.
    pub fn slot(&mut self, slot: usize) -> (Vec<f32>, Vec<f32>) {
        let (window, matrix) = self.of_slot(slot);
        (self.side.values(&window), self.side.values(&matrix))
    }

    /// The bits of window and matrix of a slot.
    pub fn slot_bits(&mut self, slot: usize) -> (Vec<u8>, Vec<u8>) {
        let (window, matrix) = self.of_slot(slot);
        (self.side.bytes(&window), self.side.bytes(&matrix))
    }

    /// Sets window and matrix of a slot.
    pub fn set_slot(&mut self, slot: usize, window: &[f32], matrix: &[f32]) {
        let (to_window, to_matrix) = self.of_slot(slot);
        let Side { backend, queue, .. } = &mut self.side;
        let rounded: Vec<_> = window.iter().map(|&x| half::bf16::from_f32(x)).collect();
        let bytes = match to_window.dtype() {
            DType::Bf16 => bytemuck::cast_slice(&rounded),
            _ => bytemuck::cast_slice(window),
        };
        backend.upload(queue, &to_window, bytes).unwrap();
        backend.upload(queue, &to_matrix, bytemuck::cast_slice(matrix)).unwrap();
    }
}

pub fn at(slot: u32, start: u32, row: u32, len: u32) -> Segment {
    Segment { slot, start, row, len, ..Segment::default() }
}

pub fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

/// Rows of a prompt in slot 1 on both backends.
fn compare_prompt(d: GdnShape, rows: usize, gate: OutputGate) {
    let Some(gpu) = gpu() else { return };
    let mut rng = Rng::new((rows + d.value_dim) as u64);
    let layer = Layer { gate, ..Layer::random(d, &mut rng) };
    let inputs = Inputs::random(&d, rows, &mut rng);
    let segments = [at(1, 0, 0, rows as u32)];
    let mut cpu = Net::new(ninfer_kernels::cpu::Cpu::new(), &layer, 2, 1);
    let mut cuda = Net::new(gpu, &layer, 2, 1);
    let what = format!("{d:?}, {rows} rows");
    let expected = cpu.prefill(rows, &segments, &inputs);
    near(&what, &cuda.prefill(rows, &segments, &inputs), &expected, PROMPT);
    let ((got_window, got), (window, matrix)) = (cuda.slot(1), cpu.slot(1));
    same(&format!("{what}: window"), &got_window, &window);
    let state = if (d.key_dim, d.value_dim, d.conv_kernel) == (128, 128, 4) { CHUNK_STATE } else { STATE };
    near(&format!("{what}: state"), &got, &matrix, state);
    assert!(cuda.slot(0).1.iter().all(|x| x.is_nan()), "{what}: slot 0 was touched");
}

#[test]
fn prompts_are_the_cpu_operation() {
    for d in sizes() {
        for rows in (1..=17).chain([31, 32, 33, 63, 64, 65, 127, 128, 129]) {
            compare_prompt(d, rows, if rows % 2 == 0 { OutputGate::Silu } else { OutputGate::Sigmoid });
        }
    }
    compare_prompt(dims(1, 2, 128, 128, 4), 1000, OutputGate::Silu);
    compare_prompt(dims(16, 32, 128, 128, 4), 33, OutputGate::Silu);
    compare_prompt(dims(16, 48, 128, 128, 4), 20, OutputGate::Silu);
}

/// Steps from a state far from zero, without and behind a fold, on both backends.
#[test]
fn steps_are_the_cpu_operation() {
    let Some(gpu) = gpu() else { return };
    let large = [dims(16, 32, 128, 128, 4), dims(16, 48, 128, 128, 4)];
    for d in sizes().into_iter().chain(large) {
        for rows in (1..=16).filter(|rows| d.key_heads < 16 || [1, 4, 16].contains(rows)) {
            let mut rng = Rng::new((rows * 31 + d.key_dim) as u64);
            let layer = Layer::random(d, &mut rng);
            let (first, second) = (Inputs::random(&d, rows, &mut rng), Inputs::random(&d, rows, &mut rng));
            let window = exact(rng.values(d.channels() * (d.conv_kernel - 1), 1.0));
            let matrix = rng.values(d.values() * d.key_dim, 1.0);
            let mut cpu = Net::new(ninfer_kernels::cpu::Cpu::new(), &layer, 2, 16);
            let mut cuda = Net::new(gpu.clone(), &layer, 2, 16);
            cpu.set_slot(1, &window, &matrix);
            cuda.set_slot(1, &window, &matrix);
            let len = rows as u32;
            let round = [at(1, 50, 0, len)];
            let what = format!("{d:?}, {rows} rows");
            near(&what, &cuda.step(rows, &round, &first), &cpu.step(rows, &round, &first), ROUND);
            let unchanged = cuda.slot(1);
            same(&format!("{what}: window"), &unchanged.0, &window);
            same(&format!("{what}: state"), &unchanged.1, &matrix);
            let n = len.div_ceil(2);
            let next = [Segment { fold: n, bank: 1, ..at(1, 50 + n, 0, len) }];
            near(&what, &cuda.step(rows, &next, &second), &cpu.step(rows, &next, &second), ROUND);
            let ((got_window, got), (window, matrix)) = (cuda.slot(1), cpu.slot(1));
            same(&format!("{what}: folded window"), &got_window, &window);
            near(&format!("{what}: folded state"), &got, &matrix, FOLDED);
        }
    }
}

/// Results and state depend on the tokens alone, wherever a prompt is split. Prompts in chunks: see gdn_chunk.
#[test]
fn prompts_may_be_split_anywhere() {
    let Some(gpu) = gpu() else { return };
    for d in [dims(2, 4, 16, 24, 4), dims(1, 3, 128, 128, 3), dims(1, 1, 40, 16, 6)] {
        let rows = 200;
        let mut rng = Rng::new(rows as u64);
        let layer = Layer::random(d, &mut rng);
        let inputs = Inputs::random(&d, rows, &mut rng);
        let mut net = Net::new(gpu.clone(), &layer, 1, 1);
        let whole = net.prefill(rows, &[at(0, 0, 0, rows as u32)], &inputs);
        let end = net.slot_bits(0);
        for split in [1, 2, 3, 15, 16, 17, 63, 64, 65, 128, 192, 199] {
            let mut parts = Vec::new();
            for range in [0..split, split..rows] {
                let (start, len) = (range.start as u32, range.len() as u32);
                parts.extend(net.prefill(range.len(), &[at(0, start, 0, len)], &inputs.range(&d, range)));
            }
            same(&format!("split at {split}"), &bits(&parts), &bits(&whole));
            assert_eq!(net.slot_bits(0), end, "split at {split}");
        }
    }
}

/// Several prompts and padding rows of NaN in one call give what each gives alone.
#[test]
fn prompts_of_several_sequences() {
    let Some(gpu) = gpu() else { return };
    for d in [dims(1, 2, 16, 24, 4), dims(2, 4, 128, 128, 4)] {
        let mut rng = Rng::new(5);
        let layer = Layer::random(d, &mut rng);
        let inputs = Inputs::random(&d, 60, &mut rng);
        let lens = [17usize, 0, 1, 40, 2];
        let (mut together, mut alone) = (Net::new(gpu.clone(), &layer, 6, 1), Net::new(gpu.clone(), &layer, 6, 1));
        let (mut segments, mut places, mut from, mut row) = (Vec::new(), Vec::new(), 0, 3);
        let mut expected = Vec::new();
        for (slot, len) in lens.into_iter().enumerate() {
            segments.push(at(slot as u32, 0, row as u32, len as u32));
            places.extend((0..len).map(|i| (from + i, row + i)));
            if len > 0 {
                let values =
                    alone.prefill(len, &[at(slot as u32, 0, 0, len as u32)], &inputs.range(&d, from..from + len));
                expected.push((row, values));
            }
            from += len;
            row += len + 2;
        }
        let got = together.prefill(row, &segments, &inputs.placed(&d, row, &places));
        for (row, values) in expected {
            same(&format!("rows from {row}"), &bits(&got[row * d.values()..][..values.len()]), &bits(&values));
        }
        for slot in 0..6 {
            assert_eq!(together.slot_bits(slot), alone.slot_bits(slot), "slot {slot}");
        }
        // Padding rows are zeros, so that nothing that follows meets a number that is none.
        assert!(got[..3 * d.values()].iter().all(|x| *x == 0.0));
    }
}

/// A tap without weight in front of the others changes nothing but the kernels that run: those for other numbers of taps
/// than four give the bits of the one that does a whole round.
#[test]
fn all_kernels_of_rounds_give_the_same_bits() {
    let Some(gpu) = gpu() else { return };
    for d in [dims(2, 2, 128, 128, 4), dims(2, 4, 128, 128, 4), dims(1, 3, 128, 128, 4)] {
        let mut rng = Rng::new(21);
        let layer = Layer::random(d, &mut rng);
        let conv = layer.conv.chunks(4).flat_map(|taps| [&[0.0], taps].concat()).collect();
        let longer = Layer { dims: GdnShape { conv_kernel: 5, ..d }, conv, ..layer.clone() };
        let rounds = Inputs::random(&d, 33, &mut rng);
        let window = exact(rng.values(d.channels() * 3, 1.0));
        let longer_window: Vec<_> = window.chunks(3).flat_map(|columns| [&[0.0], columns].concat()).collect();
        let matrix = rng.values(d.values() * d.key_dim, 1.0);
        let mut nets = [&layer, &longer].map(|layer| Net::new(gpu.clone(), layer, 1, 16));
        nets[0].set_slot(0, &window, &matrix);
        nets[1].set_slot(0, &longer_window, &matrix);
        let results = nets.each_mut().map(|net| {
            let mut values = Vec::new();
            let (mut start, mut fold, mut bank, mut from) = (7, 0, 0, 0);
            for (len, accepted) in [(1, 1), (4, 3), (16, 16), (12, 0)] {
                let segment = Segment { fold, bank, ..at(0, start, 0, len as u32) };
                values.extend(net.step(len, &[segment], &rounds.range(&d, from..from + len)));
                (start, fold, bank, from) = (start + accepted, accepted, 1 - bank, from + len);
            }
            (bits(&values), net.slot_bits(0).1)
        });
        same(&format!("{d:?}"), &results[1].0, &results[0].0);
        same(&format!("{d:?}: state"), &results[1].1, &results[0].1);
    }
}
