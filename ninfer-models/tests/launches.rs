//! What a round asks of a device: launches, copies and allocations, counted by a backend that wraps the CPU.

mod support;

use ninfer_core::WeightFormat;
use ninfer_core::model::{CausalModel, LaneOptions, PrefillEnd, RoundRow};
use ninfer_core::testing::Counting;
use ninfer_kernels::cpu::Cpu;
use ninfer_models::qwen35::{Qwen35, SyntheticWeights};
use ninfer_models::session::SessionOptions;

type Counted = Counting<Cpu>;

fn load(moe: bool, format: WeightFormat) -> (Counted, Qwen35<Counted>) {
    let backend = Counting::new(Cpu::new());
    let source = SyntheticWeights::new(support::config(moe), format, 7);
    let model = Qwen35::from_source(&backend, &source, &mut |_| {}).unwrap();
    (backend, model)
}

/// Launches of one round of a warm session, with `drafts` verified and as many made.
fn launches(moe: bool, format: WeightFormat, lanes: usize, drafts: usize) -> u64 {
    let (backend, model) = load(moe, format);
    let mut s = model.session(&SessionOptions::new(256).with_lanes(lanes)).unwrap();
    let mut open: Vec<_> = (0..lanes).map(|_| s.open_lane(&LaneOptions::new(128)).unwrap()).collect();
    for lane in &mut open {
        s.prefill(lane, &[1, 2, 3], PrefillEnd::Choose { drafts }, None).unwrap();
    }
    let guesses = [7, 8, 9, 10, 11];
    let mut last = 0;
    // The first round records; the others only replay.
    for i in 0..4 {
        backend.reset();
        let mut refs: Vec<_> = open.iter_mut().collect();
        let row = RoundRow::new(5).with_drafts(&guesses[..drafts]).with_next_drafts(drafts);
        let round = s.verify(&mut refs, &vec![row; lanes]).unwrap();
        let counts = backend.counts();
        round.commit(&vec![1; lanes]).unwrap();
        let catching_up = u64::from(drafts > 0) * lanes as u64;
        if i > 0 {
            assert_eq!(counts.recorded, 0);
            assert_eq!(counts.allocations, 0, "a round allocates nothing on the device");
            assert_eq!(counts.prepared, 0);
            assert_eq!(counts.downloads, 1, "one synchronisation a round");
            assert!(counts.uploads <= 1 + catching_up, "one upload of inputs");
            // Accepted counts and token ids, nothing else (P10).
            let words = lanes * (1 + drafts + 1 + drafts);
            assert_eq!(counts.downloaded_bytes, 4 * words as u64);
            assert_eq!(counts.replays, 1);
            last = counts.replayed.total();
        }
    }
    last
}

#[test]
fn a_round_is_one_upload_one_replay_one_download() {
    for lanes in [1, 3] {
        launches(true, WeightFormat::Bf16, lanes, 0);
        launches(false, WeightFormat::Bf16, lanes, 0);
    }
}

#[test]
fn launches_do_not_depend_on_format_or_number_of_lanes() {
    // P29: a second-level scale is not a launch of its own.
    let plain = launches(true, WeightFormat::Bf16, 1, 0);
    assert_eq!(plain, launches(true, WeightFormat::Nvfp4, 1, 0));
    assert_eq!(plain, launches(true, WeightFormat::Fp8Block, 1, 0));
    assert_eq!(plain, launches(true, WeightFormat::Bf16, 4, 0));
    // Embedding, final norm, hidden states, head with argmax, acceptance; per layer the mixer (GDN 3 or attention 4) and
    // the experts (2).
    assert_eq!(plain, 5 + 3 * (3 + 2) + (4 + 2));
    // Dense layers have two launches behind the mixer as well.
    assert_eq!(launches(false, WeightFormat::Bf16, 1, 0), plain);
}

#[test]
fn drafting_adds_a_fixed_number_of_launches_per_draft() {
    let passes: Vec<u64> = (1..=4).map(|k| launches(true, WeightFormat::Bf16, 1, k)).collect();
    // Each further draft is one pass of the MTP block (stem, attention 4, experts 2, norm) and an argmax.
    assert!(passes.windows(2).all(|w| w[1] - w[0] == 9), "{passes:?}");
}
