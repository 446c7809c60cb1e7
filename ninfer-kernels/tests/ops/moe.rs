//! Router and experts.

use ninfer_core::backend::InferenceBackend;
use ninfer_core::ops::{Experts, Norm, Route};
use ninfer_core::segment::{Profile, Segment};
use ninfer_core::{Backend, WeightFormat};
use ninfer_kernels::cpu::Cpu;

use super::close::{GOLDEN, close, close_by, same_bits};
use super::lab::{Lab, Mat};
use super::oracle::moe::Block;
use super::oracle::{self, moe, wide};
use super::rng::Rng;
use super::stored::{FORMATS, Stored};

/// A norm that changes nothing (see `golden`).
const IDENTITY: (f32, f32) = (999_999.0, 1e12);

/// Routes rows whose logits are exactly `logits`, one row at a time: one feature of 1, and the logits as router weights.
fn route_logits(logits: &[&[f32]], k: usize, renormalise: bool) -> (Vec<i32>, Vec<f32>) {
    let experts = logits[0].len();
    let (mut ids, mut weights) = (Vec::new(), Vec::new());
    for column in logits {
        let mut lab = Lab::cpu();
        let (input, hidden) = (lab.input(1, 1, &[1.0f32]), lab.output::<f32>(1, 1));
        let (chosen, weight) = (lab.output::<i32>(1, k), lab.output::<f32>(1, k + 1));
        let op = Route {
            batch: lab.one(Profile::Step, 1, 0),
            input: input.v(),
            norm: Norm { gain: lab.input(1, 1, &[IDENTITY.0]).v(), eps: IDENTITY.1 },
            router: lab.weight(&[Stored::plain(experts, 1, column).packed()]),
            shared_gate: lab.weight(&[Stored::plain(1, 1, &[0.0]).packed()]),
            renormalise,
            hidden: hidden.v(),
            experts: chosen.v(),
            weights: weight.v(),
        };
        lab.run(|r| r.route(op));
        ids.extend(lab.read::<i32>(&chosen));
        let got = lab.read::<f32>(&weight);
        assert_eq!(got[k], 0.5, "sigmoid of 0");
        weights.extend_from_slice(&got[..k]);
    }
    (ids, weights)
}

/// P43: softmax over all experts, then the top two, then the division by their sum.
#[test]
fn softmax_comes_before_top_k() {
    let logits: &[&[f32]] = &[&[3.0, 2.0, 1.0, 0.0]];
    // e³, e², e, 1 over their sum 31.192874.
    let (ids, plain) = route_logits(logits, 2, false);
    assert_eq!(ids, [0, 1]);
    close("as they are", &plain, &[0.643_914_26, 0.236_882_82], 1e-7);
    // e³ / (e³ + e²) = 1 / (1 + e⁻¹).
    let (ids, renormalised) = route_logits(logits, 2, true);
    assert_eq!(ids, [0, 1]);
    close("renormalised", &renormalised, &[0.731_058_58, 0.268_941_42], 1e-7);
}

#[test]
fn equal_experts_take_the_lower_id() {
    let (ids, weights) =
        route_logits(&[&[1.0, 2.0, 2.0, 1.0, 2.0], &[0.0; 5], &[-7.0, -7.0, -7.0, -7.0, 5.0]], 3, true);
    assert_eq!(ids, [1, 2, 4, 0, 1, 2, 4, 0, 1]);
    close("equal weights", &weights[..6], &[1.0 / 3.0; 6], 1e-7);
    assert_eq!(route_logits(&[&[4.0, -0.0, 0.0]], 3, true).0, [0, 1, 2]);
}

/// Logits that no softmax has: the choice is in range and the weights say so; nothing panics.
#[test]
fn undefined_logits_give_undefined_weights() {
    const INF: f32 = f32::INFINITY;
    let rows: [&[f32]; 5] =
        [&[f32::NAN, 1.0, 2.0, 3.0], &[1.0, f32::NAN, 2.0, 3.0], &[f32::NAN; 4], &[1.0, INF, 2.0, INF], &[-INF; 4]];
    for row in rows {
        let (ids, weights) = route_logits(&[row], 3, true);
        assert_eq!(ids, [0, 1, 2], "{row:?}");
        assert!(weights.iter().all(|w| w.is_nan()), "{row:?}: {weights:?}");
    }
    // −∞ among finite logits is a probability of 0, chosen last.
    let (ids, weights) = route_logits(&[&[-INF, 1.0, -INF, 3.0]], 3, false);
    assert_eq!(ids, [3, 1, 0]);
    close("−∞", &weights, &[0.880_797_08, 0.119_202_92, 0.0], 1e-7);
}

pub struct Sizes {
    pub h: usize,
    pub experts: usize,
    pub k: usize,
    pub width: usize,
    pub shared: usize,
}

/// A block with every matrix in one format.
pub struct Net<B: Backend = Cpu> {
    router: B::Weight,
    shared_gate: B::Weight,
    gate_up: B::Weight,
    down: B::Weight,
    shared_gate_up: B::Weight,
    shared_down: B::Weight,
    gain: Mat<B>,
    renormalise: bool,
    k: usize,
}

/// The stored matrices of a block.
pub struct Weights {
    pub router: Stored,
    shared_gate: Stored,
    /// Gate and up of each expert.
    pub gate_up: Vec<[Stored; 2]>,
    down: Vec<Stored>,
    shared: [Stored; 2],
    shared_down: Stored,
    gain: Vec<f32>,
}

impl Weights {
    pub fn random(format: (WeightFormat, bool), s: &Sizes, rng: &mut Rng) -> Self {
        let mut make = |rows, cols| Stored::random(format.0, format.1, rows, cols, 0.1, rng);
        Self {
            router: make(s.experts, s.h),
            shared_gate: make(1, s.h),
            gate_up: (0..s.experts).map(|_| [make(s.width, s.h), make(s.width, s.h)]).collect(),
            down: (0..s.experts).map(|_| make(s.h, s.width)).collect(),
            shared: [make(s.shared, s.h), make(s.shared, s.h)],
            shared_down: make(s.h, s.shared),
            gain: rng.values(s.h, 0.2),
        }
    }

    pub fn load<B: InferenceBackend>(&self, lab: &mut Lab<B>, k: usize, renormalise: bool) -> Net<B> {
        let parts: Vec<_> = self.gate_up.iter().flatten().map(Stored::packed).collect();
        let down: Vec<_> = self.down.iter().map(Stored::packed).collect();
        Net {
            router: lab.weight(&[self.router.packed()]),
            shared_gate: lab.weight(&[self.shared_gate.packed()]),
            gate_up: lab.weight(&parts),
            down: lab.weight(&down),
            shared_gate_up: lab.weight(&self.shared.each_ref().map(Stored::packed)),
            shared_down: lab.weight(&[self.shared_down.packed()]),
            gain: lab.input(1, self.gain.len(), &self.gain),
            renormalise,
            k,
        }
    }

    fn block(&self) -> Block {
        let pair = |p: &[Stored; 2]| [p[0].wide(), p[1].wide()].concat();
        Block {
            gate_up: self.gate_up.iter().map(pair).collect(),
            down: self.down.iter().map(Stored::wide).collect(),
            shared_gate_up: pair(&self.shared),
            shared_down: self.shared_down.wide(),
        }
    }

    /// Compares the results of [`Net::run`] for rows `x` with the oracle.
    #[track_caller]
    fn check(&self, what: &str, x: &[f32], k: usize, renormalise: bool, got: &Results) {
        let h = self.gain.len();
        let normed = oracle::rms_norm(&wide(x), &self.gain, 1e-6);
        let logits = oracle::matmul(&normed, &self.router.wide(), h);
        let shared = oracle::matmul(&normed, &self.shared_gate.wide(), h);
        let block = self.block();
        for t in 0..x.len() / h {
            let (ids, weights) = moe::route(&logits[t * self.router.rows..][..self.router.rows], k, renormalise);
            let chosen: Vec<usize> = got.experts[t * k..][..k].iter().map(|&e| e as usize).collect();
            assert_eq!(chosen, ids, "{what}, row {t}");
            close(what, &got.weights[t * (k + 1)..][..k], &weights, GOLDEN);
            let (routed, shared) = block.token(&normed[t * h..][..h], &ids, &weights, shared[t]);
            let sum: Vec<f64> = (0..h).map(|c| f64::from(x[t * h + c]) + routed[c] + shared[c]).collect();
            // The golden tolerance belongs to values up to ten; random codes give larger ones.
            let allowed = |i: usize| GOLDEN * (sum[i].abs() / 10.0).max(1.0);
            close_by(&format!("{what}, row {t}"), &got.residual[t * h..][..h], &sum, allowed);
        }
    }
}

/// What a block gives.
pub struct Results {
    experts: Vec<i32>,
    weights: Vec<f32>,
    pub residual: Vec<f32>,
}

impl<B: InferenceBackend> Net<B> {
    /// Rows `x` of the residual stream through router and experts; rows of no segment hold NaN.
    pub fn run(&self, lab: &mut Lab<B>, profile: Profile, rows: usize, segments: &[Segment], x: &[f32]) -> Results {
        let (h, k) = (x.len() / rows, self.k);
        let (input, residual) = (lab.input(rows, h, x), lab.inout(rows, h, x));
        let (hidden, chosen) = (lab.output::<f32>(rows, h), lab.output::<i32>(rows, k));
        let weights = lab.output::<f32>(rows, k + 1);
        let batch = lab.batch(profile, rows, segments);
        let route = Route {
            batch: batch.clone(),
            input: input.v(),
            norm: Norm { gain: self.gain.v(), eps: 1e-6 },
            router: self.router.clone(),
            shared_gate: self.shared_gate.clone(),
            renormalise: self.renormalise,
            hidden: hidden.v(),
            experts: chosen.v(),
            weights: weights.v(),
        };
        let block = Experts {
            batch,
            hidden: hidden.v(),
            experts: chosen.v(),
            weights: weights.v(),
            gate_up: self.gate_up.clone(),
            down: self.down.clone(),
            shared_gate_up: self.shared_gate_up.clone(),
            shared_down: self.shared_down.clone(),
            residual: residual.v(),
        };
        lab.run(|r| {
            r.route(route)?;
            r.experts(block)
        });
        Results { experts: lab.read(&chosen), weights: lab.read(&weights), residual: lab.read(&residual) }
    }
}

fn one(rows: usize, start: u32) -> [Segment; 1] {
    [Segment { start, len: rows as u32, ..Segment::default() }]
}

#[test]
fn blocks_match_f64_in_every_format() {
    for format in FORMATS {
        let s = Sizes { h: 48, experts: 9, k: 3, width: 32, shared: 80 };
        let mut rng = Rng::new(5);
        let weights = Weights::random(format, &s, &mut rng);
        for (profile, rows, start) in
            [(Profile::Step, 1, 4), (Profile::Step, 7, 0), (Profile::Step, 33, 9), (Profile::Prefill, 66, 40)]
        {
            for renormalise in [true, false] {
                let x = rng.values(rows * s.h, 1.0);
                let mut lab = Lab::cpu().with_gaps(1, 2);
                let net = weights.load(&mut lab, s.k, renormalise);
                let got = net.run(&mut lab, profile, rows, &one(rows, start), &x);
                weights.check(&format!("{}, {rows} rows", format.0), &x, s.k, renormalise, &got);
            }
        }
    }
    // Odd sizes, all experts chosen, one expert.
    for (h, experts, k, width, shared) in [(13, 3, 3, 7, 5), (33, 1, 1, 17, 1), (20, 6, 1, 1, 3)] {
        let s = Sizes { h, experts, k, width, shared };
        let mut rng = Rng::new(h as u64);
        let weights = Weights::random((WeightFormat::Bf16, false), &s, &mut rng);
        let x = rng.values(5 * h, 1.0);
        let mut lab = Lab::cpu();
        let net = weights.load(&mut lab, k, true);
        let got = net.run(&mut lab, Profile::Step, 5, &one(5, 0), &x);
        weights.check("odd sizes", &x, k, true, &got);
    }
}

/// P42: every token goes to expert 0 and its neighbours; the others have no token, and their weights, NaN here, no effect.
#[test]
fn experts_without_a_token_are_not_touched() {
    let s = Sizes { h: 16, experts: 8, k: 2, width: 8, shared: 8 };
    let mut rng = Rng::new(6);
    let mut weights = Weights::random((WeightFormat::F32, false), &s, &mut rng);
    weights.router = Stored::plain(8, 16, &[0.0; 128]);
    for pair in &mut weights.gate_up[2..] {
        pair[0] = Stored::plain(8, 16, &[f32::NAN; 128]);
    }
    for (profile, rows) in [(Profile::Step, 6), (Profile::Prefill, 70)] {
        let x = rng.values(rows * s.h, 1.0);
        let mut lab = Lab::cpu();
        let net = weights.load(&mut lab, s.k, true);
        let got = net.run(&mut lab, profile, rows, &one(rows, 0), &x);
        assert!(got.experts.chunks(2).all(|e| e == [0, 1]));
        weights.check("expert 0", &x, s.k, true, &got);
    }
}

/// P44: gate rows come before up rows, for routed experts and for the shared one.
#[test]
fn gate_and_up_are_not_interchangeable() {
    let s = Sizes { h: 16, experts: 4, k: 2, width: 8, shared: 8 };
    let swap = |pair: &mut [Stored; 2]| {
        let [gate, up] = pair;
        std::mem::swap(gate, up);
    };
    let run = |which: usize| {
        let mut rng = Rng::new(7);
        let mut weights = Weights::random((WeightFormat::Bf16, false), &s, &mut rng);
        match which {
            1 => weights.gate_up.iter_mut().for_each(swap),
            2 => swap(&mut weights.shared),
            _ => {}
        }
        let x = rng.values(3 * s.h, 1.0);
        let mut lab = Lab::cpu();
        let net = weights.load(&mut lab, s.k, true);
        net.run(&mut lab, Profile::Step, 3, &one(3, 0), &x).residual
    };
    let results = [run(0), run(1), run(2)];
    for (a, b) in [(0, 1), (0, 2), (1, 2)] {
        assert!(results[a].iter().zip(&results[b]).any(|(x, y)| (x - y).abs() > 1e-3), "{a} and {b}");
    }
}

/// P41: the same prompt gives the same bytes, fifty times over, on any number of threads.
#[test]
fn prompts_are_repeatable() {
    let s = Sizes { h: 64, experts: 8, k: 2, width: 96, shared: 64 };
    let mut rng = Rng::new(8);
    let weights = Weights::random((WeightFormat::Bf16, false), &s, &mut rng);
    let x = rng.values(150 * s.h, 1.0);
    let mut first: Option<Vec<f32>> = None;
    for threads in [1, 2, 3] {
        let mut lab = Lab::new(Cpu::with_threads(threads).unwrap());
        let net = weights.load(&mut lab, s.k, true);
        for _ in 0..if threads == 2 { 50 } else { 2 } {
            let got = net.run(&mut lab, Profile::Prefill, 150, &one(150, 0), &x).residual;
            same_bits("repeat", &got, first.get_or_insert_with(|| got.clone()));
        }
    }
}

/// A row of NaN stays by itself, also where it shares experts with others, and so do rows that belong to no segment.
#[test]
fn nan_stays_in_its_row() {
    let s = Sizes { h: 16, experts: 4, k: 2, width: 8, shared: 8 };
    let mut rng = Rng::new(9);
    let weights = Weights::random((WeightFormat::Bf16, false), &s, &mut rng);
    let mut x = rng.values(8 * s.h, 1.0);
    x[3 * s.h + 1] = f32::NAN;
    x[7 * s.h..].fill(f32::NAN);
    for profile in [Profile::Step, Profile::Prefill] {
        let mut lab = Lab::cpu();
        let net = weights.load(&mut lab, s.k, true);
        let got = net.run(&mut lab, profile, 8, &one(7, 0), &x);
        for t in 0..7 {
            let row = &got.residual[t * s.h..][..s.h];
            assert!(row.iter().all(|y| y.is_nan() == (t == 3)), "row {t}");
        }
        let part = |t: usize| got.residual[t * s.h..][..s.h].to_vec();
        let alone = net.run(&mut lab, profile, 1, &one(1, 4), &x[4 * s.h..][..s.h]);
        same_bits("a neighbour of NaN", &alone.residual, &part(4));
    }
}
