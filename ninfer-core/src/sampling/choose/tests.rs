use super::*;
use proptest::prelude::*;

fn free(_: u32) -> u32 {
    0
}

fn sampled() -> SamplingParams {
    SamplingParams::greedy().with_temperature(1.0)
}

fn law(logits: &[f32], params: &SamplingParams) -> Vec<f64> {
    distribution(logits, logits.len(), params, &free, &mut ChooseScratch::new()).unwrap()
}

/// The definition by a full sort, step by step.
fn plain_law(logits: &[f32], limit: usize, params: &SamplingParams, count: &dyn Fn(u32) -> u32) -> Vec<f64> {
    let x: Vec<f32> = (0..limit).map(|v| penalise(logits[v], count(v as u32), params)).collect();
    let mut order: Vec<usize> = (0..limit).collect();
    order.sort_by(|&a, &b| x[b].partial_cmp(&x[a]).unwrap().then(a.cmp(&b)));
    if params.top_k > 0 {
        order.truncate(params.top_k as usize);
    }
    let best = f64::from(x[order[0]]);
    let weight = |v: usize| ((f64::from(x[v]) - best) / f64::from(params.temperature)).exp();
    order.retain(|&v| weight(v) >= f64::from(params.min_p));
    let total: f64 = order.iter().map(|&v| weight(v)).sum();
    let mut sum = 0.0;
    let mut length = 0;
    for &v in &order {
        length += 1;
        sum += weight(v);
        if sum >= f64::from(params.top_p) * total {
            break;
        }
    }
    if params.top_p < 1.0 {
        order.truncate(length);
    }
    let total: f64 = order.iter().map(|&v| weight(v)).sum();
    let mut out = vec![0.0; logits.len()];
    for v in order {
        out[v] = weight(v) / total;
    }
    out
}

#[test]
fn greedy_ties_take_the_lower_id() {
    let mut scratch = ChooseScratch::new();
    let mut choose = |logits: &[f32]| choose(logits, logits.len(), &SamplingParams::greedy(), &free, 1, &mut scratch);
    assert_eq!(choose(&[0.0, 2.0, 2.0]), Some(1));
    assert_eq!(choose(&[-0.0, 0.0]), Some(0));
    assert_eq!(choose(&[f32::NEG_INFINITY, -5.0]), Some(1));
    assert_eq!(choose(&[1.0, f32::INFINITY]), Some(1));
}

#[test]
fn rows_without_a_choice() {
    let mut scratch = ChooseScratch::new();
    for params in [SamplingParams::greedy(), sampled().with_top_p(0.5), sampled().with_top_k(1)] {
        let mut none = |logits: &[f32], limit: usize| {
            let chosen = choose(logits, limit, &params, &free, 1, &mut scratch);
            let law = distribution(logits, limit, &params, &free, &mut scratch);
            assert_eq!(chosen.is_none(), law.is_none());
            chosen.is_none()
        };
        assert!(none(&[1.0, f32::NAN, 2.0], 3));
        assert!(none(&[f32::NEG_INFINITY; 4], 4));
        assert!(none(&[f32::INFINITY, f32::NEG_INFINITY], 2));
        assert!(none(&[], 0) && none(&[1.0], 0));
        assert!(!none(&[1.0, f32::NAN], 1), "what is behind the limit is not looked at");
    }
}

#[test]
fn limit_hides_ids() {
    let mut scratch = ChooseScratch::new();
    let logits = [0.0, 1.0, 50.0];
    for seed in 0..200 {
        let params = sampled().with_seed(seed);
        assert!(choose(&logits, 2, &params, &free, 3, &mut scratch).unwrap() < 2);
    }
    assert_eq!(law(&logits, &sampled()).len(), 3);
    assert_eq!(distribution(&logits, 2, &sampled(), &free, &mut scratch).unwrap()[2], 0.0);
}

#[test]
fn top_k_keeps_exactly_k_with_ties_to_the_lower_id() {
    let p = law(&[1.0, 1.0, 1.0, 0.0], &sampled().with_top_k(2));
    assert_eq!(p, [0.5, 0.5, 0.0, 0.0]);
    let p = law(&[0.0, -0.0, 0.0], &sampled().with_top_k(1));
    assert_eq!(p, [1.0, 0.0, 0.0]);
}

#[test]
fn min_p_is_relative_to_the_best() {
    let logits = [0.0, 0.5f32.ln(), 0.05f32.ln()];
    let p = law(&logits, &sampled().with_min_p(0.1));
    assert!((p[0] - 2.0 / 3.0).abs() < 1e-7, "f32 logarithms carry 6e-8");
    assert_eq!(p[2], 0.0);
    let only = law(&[3.0, 3.0, 2.9], &sampled().with_min_p(1.0));
    assert_eq!(only, [0.5, 0.5, 0.0]);
}

#[test]
fn top_p_counts_what_top_k_left() {
    // 0.4, 0.3, 0.2, 0.1; of the best three, 0.4/0.9 reaches 0.44 alone.
    let logits = [0.4f32.ln(), 0.3f32.ln(), 0.2f32.ln(), 0.1f32.ln()];
    assert_eq!(law(&logits, &sampled().with_top_k(3).with_top_p(0.44)), [1.0, 0.0, 0.0, 0.0]);
    let two = law(&logits, &sampled().with_top_p(0.44));
    assert!(two[1] > 0.0 && two[2] == 0.0);
    assert_eq!(law(&logits, &sampled().with_top_p(1e-30)), [1.0, 0.0, 0.0, 0.0]);
}

#[test]
fn tiny_temperatures_do_not_overflow() {
    let p = law(&[30.0, 29.999, -30.0], &sampled().with_temperature(1e-38));
    assert_eq!(p, [1.0, 0.0, 0.0]);
}

#[test]
fn infinite_logits_share() {
    let p = law(&[f32::INFINITY, 0.0, f32::INFINITY], &sampled());
    assert_eq!(p, [0.5, 0.0, 0.5]);
}

#[test]
fn penalties_move_the_greedy_choice() {
    let mut scratch = ChooseScratch::new();
    let count = |v: u32| if v == 0 { PROMPT_BIT } else { u32::from(v == 1) };
    let mut pick = |params: SamplingParams| choose(&[3.0, 2.9, 2.5], 3, &params, &count, 1, &mut scratch);
    assert_eq!(pick(SamplingParams::greedy()), Some(0));
    assert_eq!(pick(SamplingParams::greedy().with_presence(1.0)), Some(0), "the prompt is not generated text");
    assert_eq!(pick(SamplingParams::greedy().with_repetition(2.0)), Some(2));
    assert_eq!(pick(SamplingParams::greedy().with_frequency(-2.0)), Some(1));
}

#[test]
fn large_vocabularies_need_several_blocks() {
    let logits: Vec<f32> = (0..50_001u32).map(|v| (v.wrapping_mul(2_654_435_761) >> 20) as f32 / 2048.0).collect();
    for params in [sampled().with_top_p(0.9), sampled().with_top_p(0.999).with_top_k(40_000), sampled().with_top_k(7)] {
        let got = law(&logits, &params);
        let want = plain_law(&logits, logits.len(), &params, &free);
        assert_eq!(got.iter().map(|&p| p > 0.0).collect::<Vec<_>>(), want.iter().map(|&p| p > 0.0).collect::<Vec<_>>());
    }
}

/// 200,000 draws under several settings; χ² below its 0.999 quantile by Wilson and Hilferty's approximation
/// `df (1 − 2/(9 df) + z √(2/(9 df)))³` with z = 3.0902.
#[test]
fn draws_follow_the_final_distribution() {
    let logits: Vec<f32> = (0..24).map(|v| ((v * 7 % 24) as f32 * 0.37).sin() * 2.0).collect();
    let count = |v: u32| if v.is_multiple_of(5) { PROMPT_BIT | (v % 3) } else { v % 2 };
    let mut scratch = ChooseScratch::new();
    for params in [
        sampled(),
        sampled().with_temperature(0.6).with_top_k(9),
        sampled().with_top_p(0.8).with_min_p(0.1),
        sampled().with_repetition(1.3).with_frequency(0.4).with_presence(-0.3).with_top_p(0.95),
    ] {
        let p = distribution(&logits, 24, &params, &count, &mut scratch).unwrap();
        let draws = 200_000;
        let mut seen = [0u32; 24];
        for position in 0..draws {
            let id = choose(&logits, 24, &params.with_seed(11), &count, position, &mut scratch).unwrap();
            seen[id as usize] += 1;
        }
        let mut chi = 0.0;
        let mut cells = -1.0;
        for (&n, &p) in seen.iter().zip(&p) {
            if p > 0.0 {
                cells += 1.0;
                chi += (f64::from(n) - p * draws as f64).powi(2) / (p * draws as f64);
            } else {
                assert_eq!(n, 0);
            }
        }
        let spread = 2.0 / (9.0 * cells);
        let quantile = cells * (1.0 - spread + 3.0902 * f64::sqrt(spread)).powi(3);
        assert!(chi < quantile, "{params:?}: χ² = {chi} with {cells} degrees of freedom");
    }
}

proptest! {
    #[test]
    fn agrees_with_the_definition(
        logits in prop::collection::vec(-8.0f32..8.0, 1..80),
        hide in 0usize..4,
        temperature in 0.05f32..3.0,
        top_k in 0u32..90,
        top_p in 0.01f32..=1.0,
        min_p in 0.0f32..0.5,
        repetition in 0.5f32..2.0,
        penalty in -1.0f32..1.0,
        seed: u64,
        position in 0u64..1_000_000,
    ) {
        let limit = logits.len().saturating_sub(hide).max(1);
        let params = sampled()
            .with_temperature(temperature)
            .with_top_k(top_k)
            .with_top_p(top_p)
            .with_min_p(min_p)
            .with_repetition(repetition)
            .with_frequency(penalty)
            .with_presence(-penalty / 2.0)
            .with_seed(seed);
        let count = |v: u32| (v % 4) | if v.is_multiple_of(3) { PROMPT_BIT } else { 0 };
        let mut scratch = ChooseScratch::new();
        let got = distribution(&logits, limit, &params, &count, &mut scratch).unwrap();
        let want = plain_law(&logits, limit, &params, &count);
        for (g, w) in got.iter().zip(&want) {
            // Both are f64; only the order of sums differs.
            prop_assert!((g - w).abs() < 1e-12, "{g} instead of {w}");
        }
        prop_assert!((got.iter().sum::<f64>() - 1.0).abs() < 1e-12);
        let id = choose(&logits, limit, &params, &count, position, &mut scratch);
        prop_assert_eq!(id, pick(&got, uniform(seed, position, Purpose::Choose, 0)));
        let greedy = SamplingParams { temperature: 0.0, ..params };
        let best = choose(&logits, limit, &greedy, &count, position, &mut scratch).unwrap();
        let x = |v: usize| penalise(logits[v], count(v as u32), &params);
        prop_assert!((0..limit).all(|v| x(v) < x(best as usize) || (x(v) == x(best as usize) && v >= best as usize)));
    }
}
