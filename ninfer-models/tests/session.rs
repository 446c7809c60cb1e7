//! Sessions on small synthetic models: splits, widths, rollback, speculation, images.

mod support;

use ninfer_core::WeightFormat;
use ninfer_core::model::{CausalModel, LaneOptions, MtpModel, PrefillEnd, RoundRow};
use ninfer_core::{Error, sampling::SamplingParams};
use ninfer_models::session::{LaneImage, SessionOptions};
use support::*;

const FORMATS: [(bool, WeightFormat); 3] =
    [(false, WeightFormat::Bf16), (true, WeightFormat::Bf16), (true, WeightFormat::Nvfp4)];

#[test]
fn splitting_a_prompt_at_multiples_of_64_changes_no_bit() {
    for (moe, format) in FORMATS {
        let model = synthetic(moe, format);
        let text = prompt(200, 320);
        let mut reference = Vec::new();
        for chunk in [256, 64, 128, 192] {
            let mut s = session(&model, SessionOptions::new(256).with_prefill_chunk(chunk));
            let mut lane = open(&mut s, 256);
            let logits = prompt_logits(&mut s, &mut lane, &text);
            let state = s.snapshot(&mut lane).unwrap();
            if reference.is_empty() {
                reference.push((logits, state));
                continue;
            }
            assert!(logits == reference[0].0, "logits differ at chunk {chunk}");
            assert!(state.image() == reference[0].1.image(), "state differs at chunk {chunk}");
        }
    }
}

#[test]
fn splitting_a_prompt_anywhere_changes_only_rounding() {
    let model = synthetic(true, WeightFormat::Bf16);
    let text = prompt(150, 320);
    let mut s = session(&model, SessionOptions::new(256));
    let mut lane = open(&mut s, 256);
    let whole = prompt_logits(&mut s, &mut lane, &text);
    drop(lane);
    for chunk in [1, 3, 67, 79] {
        let mut s = session(&model, SessionOptions::new(256).with_prefill_chunk(chunk));
        let mut lane = open(&mut s, 256);
        let parts = prompt_logits(&mut s, &mut lane, &text);
        let worst = whole.iter().zip(&parts).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(worst < 5e-4, "chunk {chunk}: {worst}");
    }
}

#[test]
fn verification_equals_decoding_bit_for_bit() {
    for (moe, format) in FORMATS {
        let model = synthetic(moe, format);
        let mut s = session(&model, SessionOptions::new(256).with_max_drafts(7));
        let text = prompt(70, 320);
        let tokens = greedy(&mut s, &text, 12);
        // One column at a time.
        let mut lane = open(&mut s, 128);
        start(&mut s, &mut lane, &text, 0);
        let mut steps = Vec::new();
        for t in &tokens[..8] {
            let mut lanes = [&mut lane];
            let round = s.verify(&mut lanes, &[RoundRow::new(*t).with_logits()]).unwrap();
            steps.push(round.outcomes()[0].logits.clone().unwrap());
            round.commit(&[1]).unwrap();
        }
        drop(lane);
        for width in 1..=8 {
            let mut lane = open(&mut s, 128);
            start(&mut s, &mut lane, &text, 0);
            let row = RoundRow::new(tokens[0]).with_drafts(&tokens[1..width]).with_logits();
            let mut lanes = [&mut lane];
            let round = s.verify(&mut lanes, &[row]).unwrap();
            let outcome = &round.outcomes()[0];
            assert_eq!(outcome.accepted, width - 1);
            assert_eq!(&outcome.tokens[..], &tokens[1..=width]);
            assert!(outcome.logits.as_deref() == Some(&steps[..width].concat()[..]), "width {width}");
        }
    }
}

#[test]
fn mtp_rounds_write_the_same_text_and_end_in_the_same_state() {
    for (moe, format) in FORMATS {
        let model = synthetic(moe, format);
        let mut s = session(&model, SessionOptions::new(256));
        let text = prompt(66, 320);
        let plain = greedy(&mut s, &text, 40);
        for k in 1..=5 {
            let mut lane = open(&mut s, 160);
            let first = start(&mut s, &mut lane, &text, k);
            let (mut tokens, mut drafts) = (first.tokens.to_vec(), first.drafts);
            assert_eq!(drafts.len(), k);
            while tokens.len() < 40 {
                let row = RoundRow::new(tokens[tokens.len() - 1]).with_drafts(&drafts).with_next_drafts(k);
                let outcome = round(&mut s, &mut lane, row);
                tokens.extend_from_slice(&outcome.tokens);
                drafts = outcome.drafts;
            }
            assert_eq!(tokens[..40], plain[..], "k = {k}");
        }
    }
}

#[test]
fn rejected_drafts_leave_no_trace_at_any_position() {
    let model = synthetic(true, WeightFormat::Bf16);
    let mut s = session(&model, SessionOptions::new(256).with_lanes(2));
    let text = prompt(66, 320);
    let tokens = greedy(&mut s, &text, 20);
    for good in 0..=5 {
        let mut lane = open(&mut s, 128);
        start(&mut s, &mut lane, &text, 0);
        let mut drafts = tokens[1..6].to_vec();
        if good < 5 {
            drafts[good] = (drafts[good] + 1) % 320;
        }
        let outcome = round(&mut s, &mut lane, RoundRow::new(tokens[0]).with_drafts(&drafts));
        assert_eq!(outcome.accepted, good);
        let speculated = s.snapshot(&mut lane).unwrap();
        drop(lane);
        // The same tokens one at a time.
        let mut lane = open(&mut s, 128);
        start(&mut s, &mut lane, &text, 0);
        for t in &tokens[..=good] {
            round(&mut s, &mut lane, RoundRow::new(*t));
        }
        let sequential = s.snapshot(&mut lane).unwrap();
        assert_eq!(speculated.image().position(), text.len() + good + 1);
        assert!(speculated.image() == sequential.image(), "after {good} accepted drafts");
    }
}

#[test]
fn dropping_a_round_and_committing_none_are_exact_rollbacks() {
    let model = synthetic(true, WeightFormat::Bf16);
    let mut s = session(&model, SessionOptions::new(256));
    let text = prompt(66, 320);
    let tokens = greedy(&mut s, &text, 20);
    let mut lane = open(&mut s, 128);
    let mut out = start(&mut s, &mut lane, &text, 0).tokens.to_vec();
    let wrong = [1, 2, 3];
    while out.len() < 20 {
        let anchor = out[out.len() - 1];
        let before = lane.position();
        {
            let mut lanes = [&mut lane];
            drop(s.verify(&mut lanes, &[RoundRow::new(anchor).with_drafts(&wrong)]).unwrap());
        }
        {
            let mut lanes = [&mut lane];
            s.verify(&mut lanes, &[RoundRow::new(anchor).with_drafts(&wrong)]).unwrap().commit(&[0]).unwrap();
        }
        assert_eq!(lane.position(), before);
        out.extend_from_slice(&round(&mut s, &mut lane, RoundRow::new(anchor)).tokens);
    }
    assert_eq!(out, tokens);
}

#[test]
fn committing_fewer_tokens_than_accepted_goes_on_correctly() {
    let model = synthetic(false, WeightFormat::Bf16);
    let mut s = session(&model, SessionOptions::new(256));
    let text = prompt(66, 320);
    let tokens = greedy(&mut s, &text, 30);
    for keep in 1..=6 {
        let mut lane = open(&mut s, 128);
        start(&mut s, &mut lane, &text, 5);
        let mut lanes = [&mut lane];
        let row = RoundRow::new(tokens[0]).with_drafts(&tokens[1..6]).with_next_drafts(3);
        let round_ = s.verify(&mut lanes, &[row]).unwrap();
        assert_eq!(round_.outcomes()[0].tokens.len(), 6);
        round_.commit(&[keep]).unwrap();
        let mut out = tokens[..=keep].to_vec();
        while out.len() < 30 {
            let row = RoundRow::new(out[out.len() - 1]).with_next_drafts(2);
            out.extend_from_slice(&round(&mut s, &mut lane, row).tokens);
        }
        assert_eq!(out, tokens, "kept {keep}");
    }
}

#[test]
fn neighbours_do_not_change_a_lane() {
    let model = synthetic(true, WeightFormat::Bf16);
    let mut s = session(&model, SessionOptions::new(256).with_lanes(3));
    let texts = [prompt(66, 320), prompt(3, 320), prompt(90, 319)];
    let alone: Vec<_> = texts.iter().map(|t| greedy(&mut s, t, 12)).collect();
    let mut lanes: Vec<_> = texts.iter().map(|_| open(&mut s, 128)).collect();
    let mut out: Vec<Vec<u32>> =
        texts.iter().zip(&mut lanes).map(|(t, lane)| start(&mut s, lane, t, 3).tokens.to_vec()).collect();
    let mut drafts: Vec<Vec<u32>> = vec![vec![5, 6], vec![], vec![1, 2, 3]];
    while out.iter().any(|o| o.len() < 12) {
        let rows: Vec<_> = out
            .iter()
            .zip(&drafts)
            .enumerate()
            .map(|(i, (o, d))| RoundRow::new(o[o.len() - 1]).with_drafts(d).with_next_drafts(i))
            .collect();
        let mut refs: Vec<_> = lanes.iter_mut().collect();
        let round = s.verify(&mut refs, &rows).unwrap();
        let counts: Vec<_> = round.outcomes().iter().map(|o| o.tokens.len()).collect();
        let outcomes = round.commit(&counts).unwrap();
        for ((o, d), outcome) in out.iter_mut().zip(&mut drafts).zip(outcomes) {
            o.extend_from_slice(&outcome.tokens);
            *d = outcome.drafts.to_vec();
        }
    }
    for (o, a) in out.iter().zip(&alone) {
        assert_eq!(o[..12], a[..]);
    }
}

#[test]
fn mtp_catches_up_after_plain_decoding_and_refuses_when_it_cannot() {
    let model = synthetic(true, WeightFormat::Bf16);
    let mut s = session(&model, SessionOptions::new(512).with_lanes(2));
    let text = prompt(66, 320);
    // Drafts after j plain steps equal those of a lane that drafted all along.
    let mut steady = open(&mut s, 300);
    let mut lazy = open(&mut s, 300);
    let mut token = start(&mut s, &mut steady, &text, 2).tokens[0];
    start(&mut s, &mut lazy, &text, 0);
    for step in 0..40 {
        let a = round(&mut s, &mut steady, RoundRow::new(token).with_next_drafts(3));
        let want = if step % 13 == 12 { 3 } else { 0 };
        let b = round(&mut s, &mut lazy, RoundRow::new(token).with_next_drafts(want));
        assert_eq!(a.tokens, b.tokens);
        if want > 0 {
            assert_eq!(a.drafts, b.drafts, "step {step}");
        }
        token = a.tokens[0];
    }
    for _ in 0..80 {
        token = round(&mut s, &mut lazy, RoundRow::new(token)).tokens[0];
    }
    assert!(s.mtp_ready(&lazy).is_err());
    let mut lanes = [&mut lazy];
    let refused = s.verify(&mut lanes, &[RoundRow::new(token).with_next_drafts(1)]);
    assert!(matches!(refused, Err(Error::MtpUnavailable { .. })));
    drop(refused);
    round(&mut s, &mut lazy, RoundRow::new(token));
}

#[test]
fn an_image_goes_on_exactly_as_the_lane_it_was_taken_from() {
    let model = synthetic(true, WeightFormat::Bf16);
    let mut s = session(&model, SessionOptions::new(256).with_lanes(2));
    let text = prompt(66, 320);
    let tokens = greedy(&mut s, &text, 30);
    let mut lane = open(&mut s, 128);
    start(&mut s, &mut lane, &text, 2);
    for t in &tokens[..7] {
        round(&mut s, &mut lane, RoundRow::new(*t).with_next_drafts(2));
    }
    let bytes = s.snapshot(&mut lane).unwrap().image().to_bytes();
    let image = LaneImage::from_bytes(&bytes).unwrap();
    let mut copy = s.restore(&image, &LaneOptions::new(128)).unwrap();
    let mut out = tokens[..=7].to_vec();
    while out.len() < 30 {
        let anchor = out[out.len() - 1];
        let a = round(&mut s, &mut lane, RoundRow::new(anchor).with_next_drafts(3));
        let b = round(&mut s, &mut copy, RoundRow::new(anchor).with_next_drafts(3));
        assert_eq!((&a.tokens, &a.drafts), (&b.tokens, &b.drafts));
        out.extend_from_slice(&a.tokens);
    }
    assert_eq!(out, tokens);
    // P18: a damaged image is refused wherever it is damaged.
    for at in (0..bytes.len()).step_by(97).chain(0..64) {
        let mut bad = bytes.clone();
        bad[at] ^= 0x10;
        let read = LaneImage::from_bytes(&bad);
        assert!(matches!(read, Err(Error::Corrupt { .. })), "byte {at}");
    }
    assert!(matches!(LaneImage::from_bytes(&bytes[1..]), Err(Error::Corrupt { .. })));
    assert!(matches!(LaneImage::from_bytes(&bytes[..10]), Err(Error::Corrupt { .. })));
    let other = synthetic(false, WeightFormat::Bf16);
    let mut t = session(&other, SessionOptions::new(256));
    assert!(matches!(t.restore(&image, &LaneOptions::new(128)), Err(Error::Corrupt { .. })));
}

#[test]
fn token_counts_belong_to_the_state_of_an_image() {
    let model = synthetic(true, WeightFormat::Bf16);
    let mut s = session(&model, SessionOptions::new(256).with_lanes(2));
    // Greedy with penalties, so that a lost count changes the text and nothing else does.
    let sampling = SamplingParams::greedy().with_frequency(1.5).with_presence(0.5);
    let (text, options) = (prompt(66, 320), LaneOptions::new(128).with_sampling(sampling));
    let mut plain = s.open_lane(&options).unwrap();
    let mut taken = s.open_lane(&options).unwrap();
    let first = start(&mut s, &mut plain, &text, 0).tokens[0];
    assert_eq!(start(&mut s, &mut taken, &text, 0).tokens[0], first);
    let (mut token, mut seen) = (first, vec![first]);
    for _ in 0..30 {
        let expected = round(&mut s, &mut plain, RoundRow::new(token)).tokens[0];
        assert_eq!(round(&mut s, &mut taken, RoundRow::new(token)).tokens[0], expected, "after {} tokens", seen.len());
        // An image at every step, and every second time the lane goes on from it.
        let image = s.snapshot(&mut taken).unwrap();
        if seen.len().is_multiple_of(2) {
            drop(taken);
            taken = s.restore(&image, &options).unwrap();
        }
        token = expected;
        seen.push(token);
    }
    drop((plain, taken));
    assert_ne!(greedy(&mut s, &text, seen.len()), seen, "penalties change this text");
}

#[test]
fn a_prompt_can_follow_generated_text() {
    let model = synthetic(true, WeightFormat::Bf16);
    let mut s = session(&model, SessionOptions::new(512));
    let (first, second) = (prompt(66, 320), prompt(70, 317));
    let tokens = greedy(&mut s, &first, 10);
    // Turn one by rounds with drafts, then a second prompt; against everything as one prompt.
    let mut lane = open(&mut s, 300);
    let mut out = start(&mut s, &mut lane, &first, 3);
    let mut seen = out.tokens.to_vec();
    while seen.len() < 10 {
        let row = RoundRow::new(seen[seen.len() - 1]).with_drafts(&out.drafts).with_next_drafts(3);
        out = round(&mut s, &mut lane, row);
        seen.extend_from_slice(&out.tokens);
    }
    let committed = lane.position() - first.len();
    assert_eq!(seen[..10], tokens[..]);
    let turn = start(&mut s, &mut lane, &second, 3);
    drop(lane);
    let whole = [&first[..], &seen[..committed], &second[..]].concat();
    let mut lane = open(&mut s, 300);
    let cold = start(&mut s, &mut lane, &whole, 3);
    assert_eq!((&turn.tokens, &turn.drafts), (&cold.tokens, &cold.drafts));
}

#[test]
fn bad_requests_are_refused_and_lose_nothing() {
    let model = synthetic(false, WeightFormat::Bf16);
    let mut s = session(&model, SessionOptions::new(64).with_max_drafts(2));
    let too_long = s.open_lane(&LaneOptions::new(65));
    assert!(matches!(too_long, Err(Error::ContextOverflow { requested: 65, limit: 64 })));
    let mut lane = open(&mut s, 20);
    assert!(matches!(s.open_lane(&LaneOptions::new(1)), Err(Error::Exhausted { .. })));
    let end = PrefillEnd::Choose { drafts: 0 };
    assert!(matches!(s.prefill(&mut lane, &[], end, None), Err(Error::OutOfRange { .. })));
    assert!(matches!(s.prefill(&mut lane, &[1, 320], end, None), Err(Error::OutOfRange { .. })));
    let long = vec![1; 21];
    assert!(matches!(s.prefill(&mut lane, &long, end, None), Err(Error::ContextOverflow { requested: 21, limit: 20 })));
    let first = start(&mut s, &mut lane, &[1, 2, 3], 0).tokens[0];
    for row in [
        RoundRow::new(320),
        RoundRow::new(first).with_drafts(&[1, 999]),
        RoundRow::new(first).with_drafts(&[1, 2, 3]),
        RoundRow::new(first).with_next_drafts(3),
    ] {
        let mut lanes = [&mut lane];
        assert!(matches!(s.verify(&mut lanes, &[row]), Err(Error::OutOfRange { .. })));
    }
    let mut none: [&mut _; 0] = [];
    assert!(matches!(s.verify(&mut none, &[]), Err(Error::Shape { .. })));
    let hot = SamplingParams::greedy().with_temperature(-1.0);
    assert!(s.set_sampling(&mut lane, &hot).is_err());
    // Nothing was lost: the lane still decodes what an untouched one does.
    let mut out = vec![first];
    while lane.position() < 20 {
        out.extend_from_slice(&round(&mut s, &mut lane, RoundRow::new(out[out.len() - 1])).tokens);
    }
    let mut lanes = [&mut lane];
    assert!(matches!(s.verify(&mut lanes, &[RoundRow::new(0)]), Err(Error::ContextOverflow { .. })));
    drop(lane);
    assert_eq!(greedy(&mut s, &[1, 2, 3], out.len()), out);
    for bad in [
        SessionOptions::new(0),
        SessionOptions::new(64).with_lanes(0),
        SessionOptions::new(64).with_max_drafts(16),
        SessionOptions::new(64).with_prefill_chunk(0),
        SessionOptions::new(64).with_kv_dtype(ninfer_core::DType::U8),
    ] {
        assert!(model.session(&bad).is_err(), "{bad:?}");
    }
}

#[test]
fn a_lane_of_another_session_is_refused() {
    let model = synthetic(false, WeightFormat::Bf16);
    let mut a = session(&model, SessionOptions::new(64));
    let mut b = session(&model, SessionOptions::new(64));
    let mut lane = open(&mut a, 20);
    let end = PrefillEnd::Choose { drafts: 0 };
    assert!(matches!(b.prefill(&mut lane, &[1], end, None), Err(Error::Corrupt { .. })));
    assert!(matches!(b.snapshot(&mut lane), Err(Error::Corrupt { .. })));
    assert!(b.set_sampling(&mut lane, &SamplingParams::greedy()).is_err());
    let mut lanes = [&mut lane];
    assert!(matches!(b.verify(&mut lanes, &[RoundRow::new(1)]), Err(Error::Corrupt { .. })));
    start(&mut a, &mut lane, &[1], 0);
}
