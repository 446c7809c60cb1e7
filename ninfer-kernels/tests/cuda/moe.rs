//! Router and experts.

use ninfer_core::ops::{Experts, MoeOps, Norm, Route};
use ninfer_core::segment::Profile;
use ninfer_core::{DType, WeightFormat};

use super::lab::{EXPERTS, Side, exact, gpu, near, oldest, same};
use super::rng::Rng;
use super::stored::{FORMATS, Stored};

#[derive(Clone, Copy, Debug)]
struct Sizes {
    experts: usize,
    k: usize,
    h: usize,
    width: usize,
    shared: usize,
}

const TINY: Sizes = Sizes { experts: 5, k: 2, h: 48, width: 24, shared: 40 };
const MEDIUM: Sizes = Sizes { experts: 32, k: 8, h: 256, width: 64, shared: 96 };
/// All widths are whole records, as steps of few tokens want them; the second has more of them than a block has warps.
const WHOLE: [Sizes; 2] = [
    Sizes { experts: 24, k: 8, h: 192, width: 128, shared: 64 },
    Sizes { experts: 12, k: 4, h: 128, width: 640, shared: 576 },
];
const WIDE: Sizes = Sizes { experts: 256, k: 8, h: 128, width: 32, shared: 32 };

struct Block {
    sizes: Sizes,
    router: Stored,
    shared_gate: Stored,
    gate_up: Stored,
    down: Stored,
    shared_gate_up: Stored,
    shared_down: Stored,
    gain: Vec<f32>,
}

impl Block {
    fn new(sizes: Sizes, (format, divide): (WeightFormat, bool), rng: &mut Rng) -> Self {
        let Sizes { experts, h, width, shared, .. } = sizes;
        let mut make =
            |format, rows, cols: usize| Stored::random(format, divide, rows, cols, 1.0 / (cols as f32).sqrt(), rng);
        let plain = WeightFormat::Bf16;
        Self {
            sizes,
            router: make(plain, experts, h),
            shared_gate: make(plain, 1, h),
            gate_up: make(format, experts * 2 * width, h),
            down: make(format, experts * h, width),
            shared_gate_up: make(format, 2 * shared, h),
            shared_down: make(format, h, shared),
            gain: rng.values(h, 0.2),
        }
    }

    /// Residual after the block, and the chosen experts with their weights.
    fn run<B: MoeOps>(
        &self,
        side: &mut Side<B>,
        x: &[f32],
        rows: usize,
        forced: Option<&[i32]>,
        replay: bool,
    ) -> (Vec<f32>, Vec<i32>, Vec<f32>) {
        let Sizes { k, h, .. } = self.sizes;
        let residual = side.acts(rows, h, x);
        let hidden = side.result(rows, h);
        let experts = side.poisoned(DType::I32, rows, k);
        let weights = side.poisoned(DType::F32, rows, k + 1);
        let weight = |s: &Stored| side.backend.prepare(&[s.packed()]).unwrap();
        let (router, shared_gate) = (weight(&self.router), weight(&self.shared_gate));
        let (gate_up, down) = (weight(&self.gate_up), weight(&self.down));
        let (shared_gate_up, shared_down) = (weight(&self.shared_gate_up), weight(&self.shared_down));
        let profile = if rows <= 128 { Profile::Step } else { Profile::Prefill };
        let batch = side.one(profile, rows, 0);
        let norm = Norm { gain: side.floats(1, h, &self.gain), eps: 1e-6 };
        let route = Route {
            batch: batch.clone(),
            input: residual.clone(),
            norm,
            router,
            shared_gate,
            renormalise: true,
            hidden: hidden.clone(),
            experts: experts.clone(),
            weights: weights.clone(),
        };
        side.run(|r| r.route(route));
        let chosen = (side.read::<i32>(&experts), side.read::<f32>(&weights));
        let used = match forced {
            Some(forced) => side.plain(DType::I32, rows, k, forced),
            None => experts,
        };
        let op = Experts {
            batch,
            hidden,
            experts: used,
            weights,
            gate_up,
            down,
            shared_gate_up,
            shared_down,
            residual: residual.clone(),
        };
        if replay {
            side.replay(|r| r.experts(op));
        } else {
            side.run(|r| r.experts(op));
        }
        let values = side.values(&residual);
        side.check_guards();
        (values, chosen.0, chosen.1)
    }
}

/// Rows where both backends chose the same experts; a near tie may go either way, since the router's input is rounded.
fn agreeing(a: &[i32], b: &[i32], k: usize) -> Vec<usize> {
    let rows = a.len() / k;
    (0..rows).filter(|&r| a[r * k..(r + 1) * k] == b[r * k..(r + 1) * k]).collect()
}

#[test]
fn blocks_in_every_format_are_the_cpu_operation() {
    let Some(gpu) = gpu() else { return };
    for format in FORMATS {
        let [first, second] = WHOLE;
        let whole = [(first, 1), (first, 4), (first, 8), (second, 1), (second, 8), (second, 9)];
        let others = [(TINY, 1), (TINY, 9), (MEDIUM, 1), (MEDIUM, 7), (MEDIUM, 65), (WIDE, 4)];
        for (sizes, rows) in others.into_iter().chain(whole) {
            if format.0 == WeightFormat::Nvfp4 && sizes.width % 16 != 0 {
                continue;
            }
            let mut rng = Rng::new((sizes.h + rows) as u64);
            let block = Block::new(sizes, format, &mut rng);
            let x = exact(rng.values(rows * sizes.h, 1.0));
            let what = format!("{} {sizes:?}, {rows} rows", format.0);
            let (_, expected, weights) = block.run(&mut Side::cpu(), &x, rows, None, false);
            let (_, chosen, got) = block.run(&mut Side::new(gpu.clone()), &x, rows, None, false);
            let (k, same_rows) = (sizes.k, agreeing(&chosen, &expected, sizes.k));
            assert!(same_rows.len() * 10 >= rows * 8, "{what}: {} of {rows} rows agree", same_rows.len());
            for &row in &same_rows {
                let at = row * (k + 1)..(row + 1) * (k + 1);
                // Logits carry the rounding of the normed input: 2^-9 of sums near 1.
                near(
                    &format!("{what}: weights"),
                    &got[at.clone()],
                    &weights[at],
                    super::lab::Tolerance { l2: 1e-2, absolute: 4e-3, relative: 0.0 },
                );
            }
            let (expected_out, ..) = block.run(&mut Side::cpu(), &x, rows, Some(&expected), false);
            let (got_out, ..) = block.run(&mut Side::new(gpu.clone()), &x, rows, Some(&expected), false);
            for row in same_rows {
                let at = row * sizes.h..(row + 1) * sizes.h;
                near(&what, &got_out[at.clone()], &expected_out[at], EXPERTS);
            }
        }
    }
}

#[test]
fn a_token_never_sees_its_neighbours() {
    let Some(gpu) = gpu() else { return };
    let others = [(TINY, FORMATS[0]), (MEDIUM, FORMATS[FORMATS.len() - 1]), (WIDE, FORMATS[2])];
    let whole = FORMATS.into_iter().flat_map(|format| WHOLE.map(|sizes| (sizes, format)));
    for (sizes, format) in others.into_iter().chain(whole) {
        let mut rng = Rng::new(77);
        let block = Block::new(sizes, format, &mut rng);
        let x = exact(rng.values(128 * sizes.h, 1.0));
        let mut side = Side::new(gpu.clone());
        let alone: Vec<_> =
            (0..40).map(|r| block.run(&mut side, &x[r * sizes.h..(r + 1) * sizes.h], 1, None, false)).collect();
        for rows in [2, 3, 8, 9, 16, 17, 33, 65, 127, 128] {
            let (out, experts, weights) =
                block.run(&mut Side::new(gpu.clone()), &x[..rows * sizes.h], rows, None, rows % 2 == 0);
            for (row, one) in alone.iter().enumerate().take(rows) {
                let what = format!("{sizes:?}, row {row} of {rows}");
                same(&what, &experts[row * sizes.k..(row + 1) * sizes.k], &one.1);
                same(&what, &weights[row * (sizes.k + 1)..(row + 1) * (sizes.k + 1)], &one.2);
                same(&what, &out[row * sizes.h..(row + 1) * sizes.h], &one.0);
            }
        }
    }
}

/// The modules for the oldest devices add in the same order as those for the newest.
#[test]
fn modules_of_all_targets_agree_to_the_bit() {
    let Some(gpu) = gpu() else { return };
    let oldest = oldest();
    for format in FORMATS {
        for (sizes, rows) in [(MEDIUM, 5), (MEDIUM, 33), (WIDE, 4), (WHOLE[0], 1), (WHOLE[0], 7), (WHOLE[1], 8)] {
            let block = Block::new(sizes, format, &mut Rng::new(3));
            let x = exact(Rng::new(4).values(rows * sizes.h, 1.0));
            let (out, experts, weights) = block.run(&mut Side::new(gpu.clone()), &x, rows, None, false);
            let other = block.run(&mut Side::new(oldest.clone()), &x, rows, None, rows % 2 == 0);
            let what = format!("{} {sizes:?}, {rows} rows", format.0);
            same(&what, &other.1, &experts);
            same(&what, &other.2, &weights);
            same(&what, &other.0, &out);
        }
    }
}

#[test]
fn ties_take_the_lower_expert() {
    let Some(gpu) = gpu() else { return };
    let sizes = TINY;
    let mut rng = Rng::new(5);
    let mut block = Block::new(sizes, FORMATS[0], &mut rng);
    // All experts have the same router row.
    let row = exact(rng.values(sizes.h, 0.1));
    block.router = Stored::plain(sizes.experts, sizes.h, &row.repeat(sizes.experts));
    let x = exact(rng.values(3 * sizes.h, 1.0));
    let (_, experts, weights) = block.run(&mut Side::new(gpu), &x, 3, None, false);
    same("experts", &experts, &[0, 1, 0, 1, 0, 1]);
    for row in weights.chunks(3) {
        assert_eq!(row[..2], [0.5, 0.5]);
    }
}
