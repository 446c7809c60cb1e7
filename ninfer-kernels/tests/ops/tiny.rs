//! A model of one layer of each kind, with every operation of a real one: for promises that hold for whole steps.

use half::bf16;
use ninfer_core::backend::InferenceBackend;
use ninfer_core::format::{ActivationPrecision, GroupFormat};
use ninfer_core::ops::{
    Attend, Choose, Count, Embed, Experts, GdnMix, GdnParams, GdnRecord, GdnState, Head, HeadArgmax, KvLayer, MtpStem,
    Norm, OutputGate, Project, ProjectAdd, RmsNorm, RopeAppend, RopeTable, Route, Swiglu,
};
use ninfer_core::sampling::{PARAM_WORDS, SamplingParams};
use ninfer_core::segment::{Batch, PAGE_TOKENS, Profile, Segment};
use ninfer_core::shape::GdnShape;
use ninfer_core::{Backend, Recorder, Result, View, WeightFormat};

use super::lab::{Lab, Mat};
use super::rng::Rng;
use super::stored::Stored;

const H: usize = 96;
const D: usize = 64;
const QUERY: usize = 4;
const KV: usize = 2;
const HALF: usize = 8;
const INTERMEDIATE: usize = 200;
const EXPERTS: usize = 6;
const TOP: usize = 2;
const EXPERT_WIDTH: usize = 48;
pub const VOCAB: usize = 701;
/// Pages of each sequence.
const PAGES: usize = 5;
const EPS: f32 = 1e-6;
const DIMS: GdnShape = GdnShape { key_heads: 2, value_heads: 4, key_dim: 32, value_dim: 32, conv_kernel: 4 };

/// The model with its state and the memory of a call.
pub struct Tiny<B: Backend> {
    weights: Vec<B::Weight>,
    gains: Vec<Mat<B>>,
    head_gains: Mat<B>,
    frequencies: Mat<B>,
    pub gdn: GdnParams<B>,
    kv: KvLayer<B>,
    pub state: GdnState<B>,
    pub record: GdnRecord<B>,
    pub pages: Mat<B>,
    pub params: Mat<B>,
    pub counts: Mat<B>,
    pub previous: Mat<B>,
    pub ids: Mat<B>,
    pub index: Mat<B>,
    /// Results of operations, in order.
    pub results: Vec<Mat<B>>,
    pub chosen: Vec<Mat<B>>,
    slots: usize,
}

/// The matrices of a call, by their place in [`Tiny::results`].
#[derive(Clone, Copy)]
enum R {
    Residual,
    QueryGate,
    Key,
    Value,
    Query,
    Attention,
    Qkv,
    Z,
    A,
    B,
    Mixed,
    Hidden,
    Weights,
    Mid,
    Normed,
    Logits,
    Stem,
}

const WIDTHS: [usize; 17] = [
    H,
    QUERY * 2 * D,
    KV * D,
    KV * D,
    QUERY * D,
    QUERY * D,
    256,
    128,
    4,
    4,
    128,
    H,
    TOP + 1,
    INTERMEDIATE,
    H,
    VOCAB,
    H,
];

impl<B: InferenceBackend> Tiny<B> {
    /// A model with room for `rows` rows a call and rounds of `width` columns in each of `slots` sequences.
    pub fn new(lab: &mut Lab<B>, slots: usize, rows: usize, width: usize) -> Self {
        let mut rng = Rng::new(42);
        let formats = [
            WeightFormat::Bf16,
            WeightFormat::Fp8Block,
            WeightFormat::Nvfp4,
            WeightFormat::Group(GroupFormat::Q5),
            WeightFormat::Group(GroupFormat::W8),
            WeightFormat::F16,
            WeightFormat::Fp8Row,
        ];
        let shapes: [&[(usize, usize)]; 18] = [
            &[(VOCAB, H)],
            &[(QUERY * 2 * D, H)],
            &[(KV * D, H)],
            &[(KV * D, H)],
            &[(H, QUERY * D)],
            &[(256, H)],
            &[(128, H)],
            &[(4, H)],
            &[(4, H)],
            &[(H, 128)],
            &[(EXPERTS, H)],
            &[(1, H)],
            &[(EXPERT_WIDTH, H); 2 * EXPERTS],
            &[(H, EXPERT_WIDTH); EXPERTS],
            &[(EXPERT_WIDTH, H); 2],
            &[(H, EXPERT_WIDTH)],
            &[(INTERMEDIATE, H); 2],
            &[(H, INTERMEDIATE)],
        ];
        let mut weights: Vec<B::Weight> = Vec::new();
        for (i, parts) in shapes.iter().enumerate() {
            // Columns of NVFP4 come in sixteens.
            let format = match formats[i % 7] {
                WeightFormat::Nvfp4 if parts[0].1 % 16 != 0 => WeightFormat::Bf16,
                other => other,
            };
            // One projection, and the down matrices of the experts.
            let activations = match format {
                WeightFormat::Fp8Row => ActivationPrecision::E4m3Token,
                _ => ActivationPrecision::Native,
            };
            let random = |&(n, k): &(usize, usize)| {
                Stored::random(format, false, n, k, 0.1, &mut rng).with_activations(activations)
            };
            let stored: Vec<Stored> = parts.iter().map(random).collect();
            weights.push(lab.weight(&stored.iter().map(Stored::packed).collect::<Vec<_>>()));
        }
        let stem = Stored::random(WeightFormat::Bf16, false, H, 2 * H, 0.1, &mut rng);
        weights.push(lab.weight(&[stem.packed()]));
        let gains = (0..6).map(|_| lab.dense(1, H, &rng.values(H, 0.2))).collect();
        let frequencies: Vec<f32> = (0..HALF).map(|f| 1e7f64.powf(-(f as f64) / HALF as f64) as f32).collect();
        let channels = DIMS.channels();
        let gdn = GdnParams {
            dims: DIMS,
            conv: lab.dense(channels, 4, &rng.values(channels * 4, 0.4)).v(),
            a_log: lab.dense(1, 4, &rng.values(4, 1.0)).v(),
            dt_bias: lab.dense(1, 4, &rng.values(4, 1.0)).v(),
            gain: lab.dense(1, 32, &[1.25f32; 32]).v(),
            eps: EPS,
            gate: OutputGate::Silu,
        };
        let order = rng.permutation(slots * PAGES);
        let table: Vec<i32> = order.iter().map(|&p| p as i32).collect();
        let page_rows = slots * PAGES * KV * PAGE_TOKENS;
        let record_rows = slots * 2 * width;
        let sampling = |slot: u64| match slot % 3 {
            0 => SamplingParams::greedy().with_repetition(1.2),
            1 => SamplingParams::greedy().with_temperature(0.9).with_top_k(50).with_top_p(0.9).with_seed(slot),
            _ => SamplingParams::greedy().with_temperature(1.1).with_presence(0.3).with_seed(slot),
        };
        let pages = lab.dense(slots, PAGES, &table);
        let words: Vec<u32> = (0..slots as u64).flat_map(|s| sampling(s).to_words()).collect();
        Self {
            weights,
            gains,
            head_gains: lab.dense(2, D, &rng.values(2 * D, 0.2)),
            frequencies: lab.dense(1, HALF, &frequencies),
            gdn,
            kv: KvLayer {
                keys: lab.poisoned::<bf16>(page_rows, D).v(),
                values: lab.poisoned::<bf16>(page_rows, D).v(),
                scales: None,
                pages: pages.v(),
                heads: KV,
            },
            pages,
            state: GdnState {
                window: lab.poisoned::<f32>(slots * channels, 3).v(),
                matrix: lab.poisoned::<f32>(slots * 128, 32).v(),
            },
            record: GdnRecord {
                width,
                columns: lab.poisoned::<f32>(record_rows, channels).v(),
                key_value: lab.poisoned::<f32>(record_rows, 64 + 128).v(),
                gates: lab.poisoned::<f32>(record_rows, 8).v(),
            },
            params: lab.dense(slots, PARAM_WORDS, &words),
            counts: lab.poisoned::<u32>(slots, VOCAB),
            previous: lab.poisoned::<u32>(slots, width),
            ids: lab.poisoned::<u32>(rows, 1),
            index: lab.state(rows, 1, &(0..rows as i32).map(|i| (i * 7) % rows as i32).collect::<Vec<_>>()),
            results: WIDTHS.iter().map(|&w| lab.poisoned::<f32>(rows, w)).collect(),
            chosen: vec![lab.poisoned::<u32>(rows, 1), lab.poisoned::<u32>(rows, 1), lab.poisoned::<i32>(rows, TOP)],
            slots,
        }
    }

    /// The whole model; the batch must not change its number of rows between replays.
    pub fn forward(&self, r: &mut Recorder<'_, B>, batch: &Batch<B>) -> Result<()> {
        let rows = batch.rows;
        let at = |m: &Mat<B>| m.view.row_range(0..rows);
        let x = |which: R| at(&self.results[which as usize]);
        let w = |i: usize| self.weights[i].clone();
        let norm = |i: usize| Norm { gain: self.gains[i].v(), eps: EPS };
        let b = || batch.clone();
        let ids = || at(&self.ids);
        let experts = || at(&self.chosen[2]);
        let step = batch.profile == Profile::Step;

        r.embed(Embed { batch: b(), ids: ids()?, table: w(0), output: x(R::Residual)? })?;
        let parts = vec![(w(1), x(R::QueryGate)?), (w(2), x(R::Key)?), (w(3), x(R::Value)?)];
        r.project(Project { batch: b(), input: x(R::Residual)?, norm: Some(norm(0)), parts })?;
        r.rope_append(RopeAppend {
            batch: b(),
            query_gate: x(R::QueryGate)?,
            key: x(R::Key)?,
            value: x(R::Value)?,
            gains: self.head_gains.v(),
            eps: EPS,
            rope: RopeTable { frequencies: self.frequencies.v(), magnitude: 1.0, shift: 0 },
            query: x(R::Query)?,
            kv: self.kv.clone(),
        })?;
        r.attend(Attend {
            batch: b(),
            query: x(R::Query)?,
            query_gate: x(R::QueryGate)?,
            kv: self.kv.clone(),
            first_key: 0,
            output: x(R::Attention)?,
        })?;
        r.project_add(ProjectAdd { batch: b(), input: x(R::Attention)?, weight: w(4), residual: x(R::Residual)? })?;

        let parts = vec![(w(5), x(R::Qkv)?), (w(6), x(R::Z)?), (w(7), x(R::A)?), (w(8), x(R::B)?)];
        r.project(Project { batch: b(), input: x(R::Residual)?, norm: Some(norm(1)), parts })?;
        r.gdn_mix(GdnMix {
            batch: b(),
            qkv: x(R::Qkv)?,
            z: x(R::Z)?,
            a: x(R::A)?,
            b: x(R::B)?,
            params: self.gdn.clone(),
            state: self.state.clone(),
            record: step.then(|| self.record.clone()),
            output: x(R::Mixed)?,
        })?;
        r.project_add(ProjectAdd { batch: b(), input: x(R::Mixed)?, weight: w(9), residual: x(R::Residual)? })?;

        r.route(Route {
            batch: b(),
            input: x(R::Residual)?,
            norm: norm(2),
            router: w(10),
            shared_gate: w(11),
            renormalise: true,
            hidden: x(R::Hidden)?,
            experts: experts()?,
            weights: x(R::Weights)?,
        })?;
        r.experts(Experts {
            batch: b(),
            hidden: x(R::Hidden)?,
            experts: experts()?,
            weights: x(R::Weights)?,
            gate_up: w(12),
            down: w(13),
            shared_gate_up: w(14),
            shared_down: w(15),
            residual: x(R::Residual)?,
        })?;
        let op = Swiglu { batch: b(), input: x(R::Residual)?, norm: Some(norm(3)), gate_up: w(16), output: x(R::Mid)? };
        r.swiglu(op)?;
        r.project_add(ProjectAdd { batch: b(), input: x(R::Mid)?, weight: w(17), residual: x(R::Residual)? })?;

        r.rms_norm(RmsNorm { batch: b(), input: x(R::Residual)?, norm: norm(4), output: x(R::Normed)? })?;
        r.head(Head { batch: b(), input: x(R::Normed)?, head: w(0), logits: x(R::Logits)? })?;
        let (greedy, drawn) = (at(&self.chosen[0])?, at(&self.chosen[1])?);
        r.head_argmax(HeadArgmax { batch: b(), input: x(R::Normed)?, head: w(0), limit: 690, output: greedy })?;
        r.count(Count { batch: b(), ids: ids()?, previous: self.previous.v(), counts: self.counts.v() })?;
        r.choose(Choose {
            batch: b(),
            logits: x(R::Logits)?,
            ids: ids()?,
            params: self.params.v(),
            counts: self.counts.v(),
            limit: 690,
            output: drawn,
        })?;
        r.mtp_stem(MtpStem {
            batch: b(),
            ids: ids()?,
            table: w(0),
            hidden: x(R::Normed)?,
            // Each row its own hidden state.
            index: at(&self.index)?,
            embedding_norm: norm(4),
            hidden_norm: norm(5),
            fc: w(18),
            output: x(R::Stem)?,
        })
    }

    /// Uploads the inputs of segments; all other rows get an id outside the vocabulary.
    pub fn feed(&self, lab: &mut Lab<B>, calls: &[(Segment, &[u32])]) {
        let mut ids = vec![u32::MAX - 1; self.ids.view.rows()];
        let mut index = vec![-1i32; ids.len()];
        for (segment, tokens) in calls {
            for (i, token) in tokens.iter().enumerate() {
                let row = segment.row as usize + i;
                (ids[row], index[row]) = (*token, row as i32);
            }
        }
        lab.fill(&self.ids, &ids);
        lab.fill(&self.index, &index);
    }

    /// Runs segments of tokens; gives the bits of all results for each token, in order of segments.
    pub fn run(&self, lab: &mut Lab<B>, profile: Profile, rows: usize, calls: &[(Segment, &[u32])]) -> Vec<Vec<u32>> {
        self.feed(lab, calls);
        let segments: Vec<Segment> = calls.iter().map(|c| c.0).collect();
        let batch = lab.batch(profile, rows, &segments);
        lab.run(|r| self.forward(r, &batch));
        self.collect(lab, &segments)
    }

    /// The bits of all results for each token, in order of segments.
    pub fn collect(&self, lab: &mut Lab<B>, segments: &[Segment]) -> Vec<Vec<u32>> {
        let results: Vec<Vec<f32>> = self.results.iter().map(|m| lab.read(m)).collect();
        let ids: Vec<Vec<u32>> = self.chosen[..2].iter().map(|m| lab.read(m)).collect();
        let experts = lab.read::<i32>(&self.chosen[2]);
        let token = |row: usize| {
            let floats = results.iter().zip(WIDTHS).flat_map(|(m, w)| &m[row * w..(row + 1) * w]);
            assert!(floats.clone().all(|x| x.is_finite()), "row {row} has a value that is not finite");
            let chosen = experts[row * TOP..(row + 1) * TOP].iter().map(|e| e.cast_unsigned());
            floats.map(|x| x.to_bits()).chain(ids.iter().map(|m| m[row])).chain(chosen).collect()
        };
        segments.iter().flat_map(|s| s.row..s.row + s.len).map(|row| token(row as usize)).collect()
    }

    /// Window, matrix, counts, and the cached rows of the first `tokens` tokens of a slot, as bits.
    pub fn lane(&self, lab: &mut Lab<B>, slot: usize, tokens: usize) -> Vec<u32> {
        let part = |view: &View<B>| {
            let rows = view.rows() / self.slots;
            view.row_range(slot * rows..(slot + 1) * rows).unwrap()
        };
        let mut bits: Vec<u32> = lab.read_view::<f32>(&part(&self.state.window)).iter().map(|x| x.to_bits()).collect();
        bits.extend(lab.read_view::<f32>(&part(&self.state.matrix)).iter().map(|x| x.to_bits()));
        bits.extend(lab.read_view::<u32>(&part(&self.counts.view)));
        let table = lab.read_view::<i32>(&self.kv.pages);
        for view in [&self.kv.keys, &self.kv.values] {
            let all = lab.read_view::<bf16>(view);
            for position in 0..tokens {
                let page = table[slot * PAGES + position / PAGE_TOKENS] as usize;
                for h in 0..KV {
                    let row = (page * KV + h) * PAGE_TOKENS + position % PAGE_TOKENS;
                    bits.extend(all[row * D..(row + 1) * D].iter().map(|x| u32::from(x.to_bits())));
                }
            }
        }
        bits
    }
}
