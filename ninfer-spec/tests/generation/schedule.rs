//! Several requests in one round, driven by a scheduler of its own.

use ninfer_core::model::{CausalModel, LaneOptions, PrefillEnd};
use ninfer_core::sampling::SamplingParams;
use ninfer_spec::{Counts, Drafts, Generator, Options, Request};

use crate::toy::ToyModel;

fn options(seed: u64) -> Options {
    let sampling = SamplingParams::greedy().with_temperature(0.8).with_seed(seed);
    Options::new().with_max_new(50).with_sampling(sampling).with_drafts(Drafts::Fixed(1 + seed as usize))
}

#[test]
fn two_lanes_in_one_round_give_the_texts_of_one() {
    let prompts = [vec![1, 2, 3], vec![9, 8, 7, 6]];
    let alone: Vec<_> = (0..2)
        .map(|i| {
            let mut model = ToyModel::new();
            let mut generator = Generator::new(&mut model, options(i as u64)).unwrap();
            generator.generate(&prompts[i], |t| t.len()).unwrap()
        })
        .collect();

    let mut model = ToyModel::new();
    let mut lanes = Vec::new();
    let mut requests = Vec::new();
    let mut all = [options(0), options(1)];
    for (i, prompt) in prompts.iter().enumerate() {
        let sampling = SamplingParams::greedy().with_temperature(0.8).with_seed(i as u64);
        let mut lane = model.open_lane(&LaneOptions::new(128).with_sampling(sampling)).unwrap();
        let mut counts = Counts::new();
        counts.add_prompt(prompt);
        let mut request = Request::new(&all[i], model.limits(), 128, prompt.clone(), counts);
        let end = PrefillEnd::Choose { drafts: request.first_drafts() };
        let outcome = model.prefill(&mut lane, prompt, end, None).unwrap().unwrap();
        request.begin(&outcome).unwrap();
        request.advance(request.offered().len(), 0.0).unwrap();
        lanes.push(lane);
        requests.push(request);
    }
    while requests.iter().any(|r| r.finish().is_none()) {
        let (mut live, mut rows, mut ids) = (Vec::new(), Vec::new(), Vec::new());
        for (i, lane) in lanes.iter_mut().enumerate() {
            if requests[i].finish().is_none() {
                requests[i].plan(all[i].drafter()).unwrap();
                live.push(lane);
                ids.push(i);
            }
        }
        rows.extend(ids.iter().map(|&i| requests[i].row(all[i].rule())));
        let round = model.verify(&mut live, &rows).unwrap();
        let mut committed = Vec::new();
        for (&i, outcome) in ids.iter().zip(round.outcomes()) {
            requests[i].judge(outcome, all[i].rule()).unwrap();
            committed.push(requests[i].offered().len());
        }
        round.commit(&committed).unwrap();
        for (&i, &n) in ids.iter().zip(&committed) {
            requests[i].advance(n, 0.01).unwrap();
        }
    }
    for (request, alone) in requests.iter().zip(&alone) {
        assert_eq!(request.answer(), alone.tokens);
        assert_eq!(request.finish(), Some(alone.finish));
        assert_eq!(request.statistics().rounds, alone.statistics.rounds);
    }
}
