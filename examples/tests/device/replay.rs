//! Recorded steps against the same operations one by one, and one run against another.

use ninfer_core::backend::InferenceBackend;
use ninfer_core::model::{CausalModel, LaneOptions, PrefillEnd, RoundRow};
use ninfer_core::sampling::SamplingParams;
use ninfer_core::state::Outcome;
use ninfer_core::testing::Counting;
use ninfer_models::SessionOptions;
use ninfer_models::session::LaneImage;

use crate::bench::{Extent, model, on_every_backend, shipped_model, tiny_model, tokens};

/// Rounds of a script.
const ROUNDS: usize = 12;

/// All that two lanes give in rounds with changing numbers of drafts, with logits in some, and what state they end in.
fn script<B: InferenceBackend>(backend: &B, name: Option<&str>) -> (Vec<Outcome>, Vec<LaneImage>) {
    let model = model(backend, &name.map_or_else(shipped_model, tiny_model), "keep");
    let mut s = model.session(&SessionOptions::new(512).with_lanes(2).with_max_drafts(4)).unwrap();
    let vocab = s.limits().vocab;
    let warm = SamplingParams::greedy().with_temperature(0.8).with_top_k(20).with_presence(0.5).with_seed(7);
    let mut lanes = [SamplingParams::greedy(), warm]
        .map(|sampling| s.open_lane(&LaneOptions::new(300).with_sampling(sampling)).unwrap());
    let mut outcomes = Vec::new();
    for (i, lane) in lanes.iter_mut().enumerate() {
        let end = PrefillEnd::Choose { drafts: 3 };
        let text = tokens(66 + i, i as u32, vocab);
        outcomes.push(s.prefill(lane, &text, end, None).unwrap().unwrap());
    }
    for i in 0..ROUNDS {
        let last = outcomes[outcomes.len() - 2..].to_vec();
        let rows: Vec<_> = last
            .iter()
            .map(|o| {
                let row = RoundRow::new(*o.tokens.last().unwrap()).with_drafts(&o.drafts).with_next_drafts(1 + i % 4);
                if i % 3 == 0 { row.with_logits() } else { row }
            })
            .collect();
        let [a, b] = &mut lanes;
        let mut both = [a, b];
        let round = s.verify(&mut both, &rows).unwrap();
        let counts: Vec<_> = round.outcomes().iter().map(|o| o.tokens.len()).collect();
        outcomes.extend(round.commit(&counts).unwrap());
    }
    let images = lanes.iter_mut().map(|lane| s.snapshot(lane).unwrap().image().clone()).collect();
    (outcomes, images)
}

fn compare(what: &str, got: &(Vec<Outcome>, Vec<LaneImage>), expected: &(Vec<Outcome>, Vec<LaneImage>)) {
    for (i, (got, expected)) in got.0.iter().zip(&expected.0).enumerate() {
        let facts = |o: &Outcome| (o.accepted, o.tokens.to_vec(), o.drafts.to_vec());
        assert_eq!(facts(got), facts(expected), "{what}: outcome {i}");
        assert!(got.logits == expected.logits, "{what}: logits of outcome {i}");
    }
    assert!(got.1 == expected.1, "{what}: state");
}

fn eager<B: InferenceBackend>(backend: &B, extent: Extent) {
    for name in extent.of(&[None, Some("tiny-dense"), Some("tiny-moe")], 2) {
        let recorded = Counting::new(backend.clone());
        let eager = Counting::one_by_one(backend.clone());
        let expected = script(&eager, *name);
        let got = script(&recorded, *name);
        // Both had steps to record, and replayed some of them more often than once.
        let counts = recorded.counts();
        assert!(counts.recorded > 1 && counts.replays > counts.recorded, "{counts:?}");
        assert_eq!(eager.counts().replays, counts.replays);
        compare(&format!("{name:?}"), &got, &expected);
    }
}

fn twice<B: InferenceBackend>(backend: &B, extent: Extent) {
    let first = script(backend, None);
    for run in extent.of(&[2, 3, 4], 1) {
        compare(&format!("run {run}"), &script(backend, None), &first);
    }
}

on_every_backend! { eager, twice }
