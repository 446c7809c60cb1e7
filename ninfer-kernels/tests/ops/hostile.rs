//! Random device data for a whole model: tables, pages, indices, tokens, counts and sampling parameters hold anything that
//! 32 bits can hold. Each pass ends in `Ok` or a typed error; it never panics and never writes where it should not.

use ninfer_core::ops::{Accept, GdnFold};
use ninfer_core::segment::{Batch, Profile};
use ninfer_core::{Backend, Error, Result};

use super::lab::Lab;
use super::rng::Rng;
use super::tiny::{Tiny, VOCAB};

const ROWS: usize = 9;
const SLOTS: usize = 3;
const SEGMENTS: usize = 3;
const WIDTH: usize = 4;

/// Mostly small numbers, so that many tables are legal or nearly so; one in `odds` is the end of some range or anything.
fn word(rng: &mut Rng, small: usize, odds: usize) -> i32 {
    match rng.below(2 * odds) {
        0 => [-1, i32::MIN, i32::MAX, 0x7fc0_0000, -0x0080_0000, 64, 65, 320][rng.below(8)],
        1 => rng.bits() as i32,
        _ => rng.below(small) as i32,
    }
}

fn words(rng: &mut Rng, n: usize, small: usize, odds: usize) -> Vec<i32> {
    (0..n).map(|_| word(rng, small, odds)).collect()
}

fn tokens(rng: &mut Rng, n: usize, odds: usize) -> Vec<u32> {
    words(rng, n, VOCAB, odds).into_iter().map(i32::cast_unsigned).collect()
}

/// Segments whose words each have a limit of their own; without a bad word most of them are legal.
fn table(rng: &mut Rng, odds: usize) -> Vec<i32> {
    let limits = [SLOTS, 300, ROWS - WIDTH, WIDTH + 1, WIDTH, 2, 1, 1];
    (0..SEGMENTS).flat_map(|_| limits.map(|limit| word(rng, limit, odds))).collect()
}

#[test]
fn random_device_data_never_panics() {
    let mut rng = Rng::new(1);
    let (mut passed, mut refused) = (0, 0);
    let mut lab = Lab::cpu();
    let tiny = Tiny::new(&mut lab, SLOTS, ROWS, WIDTH);
    let segments = lab.poisoned::<i32>(SEGMENTS, 8);
    let result = lab.poisoned::<u32>(SEGMENTS, WIDTH + 1);
    let (realign, last) = (lab.poisoned::<i32>(SEGMENTS, 8), lab.poisoned::<i32>(SEGMENTS, 1));
    let chain = lab.poisoned::<i32>(2 * SEGMENTS, 8);
    let good_pages = lab.read::<i32>(&tiny.pages);
    let good_params = lab.read::<u32>(&tiny.params);
    for round in 0..900 {
        let odds = [12, 200, 5000][round % 3];
        lab.fill(&segments, &table(&mut rng, odds));
        lab.fill(&tiny.ids, &tokens(&mut rng, ROWS, odds));
        lab.fill(&tiny.index, &words(&mut rng, ROWS, ROWS, odds));
        lab.fill(&tiny.counts, &tokens(&mut rng, SLOTS * VOCAB, odds));
        lab.fill(&tiny.previous, &tokens(&mut rng, SLOTS * WIDTH, odds));
        let (mut pages, mut params) = (good_pages.clone(), good_params.clone());
        if round % 4 == 0 {
            pages = words(&mut rng, pages.len(), pages.len(), odds);
        }
        if round % 5 == 0 {
            params = tokens(&mut rng, params.len(), odds);
        }
        lab.fill(&tiny.pages, &pages);
        lab.fill(&tiny.params, &params);
        let profile = if round % 2 == 0 { Profile::Step } else { Profile::Prefill };
        let batch = Batch::new(profile, ROWS, segments.v()).unwrap();
        let fold = GdnFold {
            batch: batch.clone(),
            params: tiny.gdn.clone(),
            state: tiny.state.clone(),
            record: tiny.record.clone(),
        };
        let accept = Accept {
            batch: batch.clone(),
            ids: tiny.ids.v(),
            chosen: tiny.chosen[0].v(),
            result: result.v(),
            realign: realign.v(),
            last: last.v(),
            chain: chain.v(),
        };
        // Each of the three by itself, since the first error ends a pass.
        let backend = lab.backend.clone();
        let outcomes: [Result<()>; 3] = [
            backend.run(&mut lab.queue, |r| tiny.forward(r, &batch)),
            backend.run(&mut lab.queue, |r| r.gdn_fold(fold)),
            backend.run(&mut lab.queue, |r| r.accept(accept)),
        ];
        for outcome in outcomes {
            match outcome {
                Ok(()) => passed += 1,
                Err(Error::OutOfRange { .. } | Error::ContextOverflow { .. }) => refused += 1,
                Err(other) => panic!("{other}"),
            }
        }
        if round % 20 == 0 {
            lab.check();
        }
    }
    lab.check();
    assert!(passed > 500 && refused > 500, "{passed} passed, {refused} were refused");
}
