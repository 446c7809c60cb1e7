//! What was measured, as tables and as JSON.

use std::path::Path;

use ninfer_core::device::DeviceInfo;
use ninfer_examples::table::{Align, Table, grouped};
use ninfer_examples::{Failure, Result};
use serde::{Deserialize, Serialize};

use crate::breakdown::Breakdown;

/// What a file of this bench calls itself.
pub const SCHEMA: &str = "ninfer-roofline";
/// Version of the fields below; a reader takes its own version only.
pub const VERSION: u32 = 2;

/// One run of the bench.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// [`SCHEMA`].
    pub schema: String,
    /// [`VERSION`].
    pub version: u32,
    /// Version of the library.
    pub library: String,
    pub device: DeviceInfo,
    pub model: String,
    pub format: String,
    pub weight_bytes: u64,
    pub load_seconds: f64,
    pub ceilings: Ceilings,
    pub rows: Vec<Row>,
    pub breakdowns: Vec<Breakdown>,
}

/// What the device was measured to do in the same run.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Ceilings {
    /// Bytes read plus bytes written.
    pub copy_bytes_per_second: f64,
    pub read_bytes_per_second: f64,
    /// The library's own product of a prompt, 8,192³ in BF16.
    pub product_flops: f64,
}

/// What a row measures.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// A prompt of one sequence.
    Prefill,
    /// Steps of one token of one sequence.
    Decode,
    /// Rounds with drafts of one sequence.
    Round,
    /// Steps of one token of several sequences, in a session without MTP.
    Aggregate,
}

/// One measurement.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Row {
    pub kind: Kind,
    /// Tokens in front.
    pub prompt: usize,
    /// Storage of the KV cache.
    pub kv: String,
    /// Rows of a prompt chunk as asked for; only of a prefill.
    pub chunk: Option<String>,
    pub sequences: usize,
    pub drafts: usize,
    /// Median of the prompt, the step or the round.
    pub seconds: f64,
    pub tokens_per_second: f64,
    /// Bytes that must move in a step or round.
    pub bytes: Option<u64>,
    /// Share of the copy bandwidth; of a prefill, of the product rate.
    pub share: f64,
    /// Median time of the recorded step on the device.
    pub device_seconds: Option<f64>,
    /// Kernels, copies and fills of it.
    pub launches: Option<usize>,
    /// Tokens that a round counts.
    pub tokens_per_round: Option<f64>,
    /// Probability with which a draft was counted.
    pub acceptance: Option<f64>,
    /// Routed experts of a layer that the rows of a step reach, expected under uniform routing.
    pub distinct_experts: Option<f64>,
}

impl Row {
    /// What else it needs to be the same measurement in another run.
    pub fn key(&self) -> (Kind, usize, &str, Option<&str>, usize, usize) {
        (self.kind, self.prompt, &self.kv, self.chunk.as_deref(), self.sequences, self.drafts)
    }

    /// Time outside of the recorded step: the host's work and the transfers of a few bytes.
    pub fn host_seconds(&self) -> Option<f64> {
        self.device_seconds.map(|device| (self.seconds - device).max(0.0))
    }

    /// Its key in words.
    pub fn name(&self) -> String {
        let Self { prompt, kv, .. } = self;
        match self.kind {
            Kind::Prefill => {
                format!("prefill {}, {kv}, chunk {}", grouped(*prompt as u64), self.chunk.as_deref().unwrap_or("?"))
            }
            Kind::Decode => format!("decode behind {}, {kv}", grouped(*prompt as u64)),
            Kind::Round => format!("round of {} drafts behind {}, {kv}", self.drafts, grouped(*prompt as u64)),
            Kind::Aggregate => format!("{} sequences behind {}, {kv}", self.sequences, grouped(*prompt as u64)),
        }
    }
}

impl Report {
    /// A report that an earlier run wrote.
    pub fn read(file: &Path) -> Result<Self> {
        let text = std::fs::read_to_string(file).map_err(|e| Failure::unreadable(file, &e))?;
        #[derive(Deserialize)]
        struct Head {
            schema: Option<String>,
            version: Option<u32>,
        }
        let head: Head = serde_json::from_str(&text).map_err(|e| Failure::content(file, e.to_string()))?;
        match (head.schema.as_deref(), head.version) {
            (Some(SCHEMA), Some(VERSION)) => {}
            (Some(SCHEMA), Some(version)) => {
                let message = format!("version {version} of {SCHEMA}, but version {VERSION} is read");
                return Err(Failure::content(file, message));
            }
            _ => return Err(Failure::content(file, format!("no JSON of {SCHEMA}"))),
        }
        serde_json::from_str(&text).map_err(|e| Failure::content(file, e.to_string()))
    }

    /// Everything for people.
    pub fn tables(&self) -> String {
        let c = &self.ceilings;
        let driver = self.device.driver.map_or_else(|| "unknown".to_owned(), |d| d.to_string());
        let mut text = format!(
            "{}, driver for CUDA {driver}\ncopy {:.0} GB/s, read {:.0} GB/s, own BF16 product of 8,192³ {:.0} TFLOP/s\n\
             {} {}: {:.2} GB of weights, made in {:.1} s\n",
            self.device.name,
            c.copy_bytes_per_second / 1e9,
            c.read_bytes_per_second / 1e9,
            c.product_flops / 1e12,
            self.model,
            self.format,
            self.weight_bytes as f64 / 1e9,
            self.load_seconds
        );
        let section = |text: &mut String, title: &str, table: Option<Table>| {
            if let Some(table) = table {
                text.push_str(&format!("\n{title}\n\n{table}"));
            }
        };
        section(&mut text, "Prefill (share: products of the layers against the own BF16 product)", self.prefill());
        section(
            &mut text,
            "Decoding (share: bytes that must move against a copy; host: the step without its time on the device)",
            self.steps(&[Kind::Decode, Kind::Aggregate]),
        );
        section(
            &mut text,
            "Rounds with drafts (accepted by a coin; experts: a layer, expected)",
            self.steps(&[Kind::Round]),
        );
        for breakdown in &self.breakdowns {
            section(&mut text, &breakdown.title(), Some(breakdown.table()));
            text.push_str(&breakdown.summary());
        }
        text
    }

    fn of(&self, kinds: &[Kind]) -> Vec<&Row> {
        self.rows.iter().filter(|r| kinds.contains(&r.kind)).collect()
    }

    fn prefill(&self) -> Option<Table> {
        let rows = self.of(&[Kind::Prefill]);
        let heads = ["prompt", "KV", "chunk", "tok/s", "s", "against first chunk", "share"];
        let mut table = Table::new(&heads.map(|h| (h, Align::Right)));
        for row in &rows {
            // The chunks of one prompt stand together.
            let first = rows.iter().find(|r| (r.prompt, &r.kv) == (row.prompt, &row.kv));
            let ratio = first.map_or(1.0, |f| row.tokens_per_second / f.tokens_per_second);
            table.row([
                grouped(row.prompt as u64),
                row.kv.clone(),
                row.chunk.clone().unwrap_or_default(),
                format!("{:.0}", row.tokens_per_second),
                format!("{:.3}", row.seconds),
                format!("{ratio:.2}"),
                format!("{:.3}", row.share),
            ]);
        }
        (!rows.is_empty()).then_some(table)
    }

    fn steps(&self, kinds: &[Kind]) -> Option<Table> {
        let rows = self.of(kinds);
        let drafting = kinds.contains(&Kind::Round);
        let mut heads = vec!["prompt", "KV"];
        heads.push(if drafting { "drafts" } else { "sequences" });
        heads.extend(["tok/s", "ms", "GB", "share", "host µs", "host share", "launches", "experts"]);
        if drafting {
            heads.extend(["tokens", "acceptance", "plain steps"]);
        }
        let columns: Vec<_> = heads.iter().map(|&h| (h, Align::Right)).collect();
        let mut table = Table::new(&columns);
        let or_dash = |value: Option<String>| value.unwrap_or_else(|| "-".to_owned());
        for row in &rows {
            let plain = self.of(&[Kind::Decode]).into_iter().find(|r| (r.prompt, &r.kv) == (row.prompt, &row.kv));
            let host = row.host_seconds();
            table.row([
                grouped(row.prompt as u64),
                row.kv.clone(),
                if drafting { row.drafts } else { row.sequences }.to_string(),
                format!("{:.1}", row.tokens_per_second),
                format!("{:.3}", row.seconds * 1e3),
                or_dash(row.bytes.map(|b| format!("{:.3}", b as f64 / 1e9))),
                format!("{:.3}", row.share),
                or_dash(host.map(|h| format!("{:.0}", h * 1e6))),
                or_dash(host.map(|h| format!("{:.1} %", 100.0 * h / row.seconds))),
                or_dash(row.launches.map(|n| n.to_string())),
                or_dash(row.distinct_experts.map(|n| format!("{n:.1}"))),
                or_dash(row.tokens_per_round.map(|n| format!("{n:.2}"))),
                or_dash(row.acceptance.map(|p| format!("{p:.2}"))),
                or_dash(plain.map(|p| format!("{:.2}", row.seconds / p.seconds))),
            ]);
        }
        (!rows.is_empty()).then_some(table)
    }
}

/// Middle of some values, the upper one of two; `None` of nothing.
pub fn median(values: &[f64]) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied()
}

#[cfg(test)]
pub mod tests {
    use ninfer_core::capability::Capability;

    use super::*;

    pub fn row(kind: Kind, prompt: usize, seconds: f64) -> Row {
        let is_round = kind == Kind::Round;
        let is_prefill = kind == Kind::Prefill;
        Row {
            kind,
            prompt,
            kv: "i8".to_owned(),
            chunk: is_prefill.then(|| "full".to_owned()),
            sequences: if kind == Kind::Aggregate { 4 } else { 1 },
            drafts: if is_round { 3 } else { 0 },
            seconds,
            tokens_per_second: if is_prefill { prompt as f64 } else { 1.0 } / seconds,
            bytes: (!is_prefill).then_some(2_750_000_000),
            share: 0.5,
            device_seconds: (!is_prefill).then_some(seconds * 0.98),
            launches: (!is_prefill).then_some(321),
            tokens_per_round: is_round.then_some(2.5),
            acceptance: is_round.then_some(0.7),
            distinct_experts: None,
        }
    }

    pub fn report(rows: Vec<Row>) -> Report {
        Report {
            schema: SCHEMA.to_owned(),
            version: VERSION,
            library: "0".to_owned(),
            device: DeviceInfo::cuda("Card", Capability::new(9, 0), 132),
            model: "27b".to_owned(),
            format: "groupwise".to_owned(),
            weight_bytes: 16_000_000_000,
            load_seconds: 1.0,
            ceilings: Ceilings { copy_bytes_per_second: 4.2e12, read_bytes_per_second: 4.3e12, product_flops: 7e14 },
            rows,
            breakdowns: Vec::new(),
        }
    }

    /// A file of its own in the folder for temporary ones, removed in the end.
    struct Temporary(std::path::PathBuf);

    impl Temporary {
        fn new(name: &str, text: &str) -> Self {
            let file = std::env::temp_dir().join(format!("ninfer-roofline-{}-{name}.json", std::process::id()));
            std::fs::write(&file, text).unwrap();
            Self(file)
        }
    }

    impl Drop for Temporary {
        fn drop(&mut self) {
            let _ = std::fs::remove_file(&self.0);
        }
    }

    #[test]
    fn what_is_written_is_read_and_other_versions_are_refused() {
        let report = report(vec![row(Kind::Decode, 512, 1e-3), row(Kind::Prefill, 512, 0.1)]);
        let text = serde_json::to_string(&report).unwrap();
        let file = Temporary::new("same", &text);
        assert_eq!(Report::read(&file.0).unwrap(), report);
        for (name, text, words) in [
            ("newer", text.replacen("\"version\":2", "\"version\":3", 1), "version 3"),
            ("older", "{\"decode_share\":0.5}".to_owned(), "no JSON of ninfer-roofline"),
            ("other", "[1".to_owned(), "line 1"),
            ("short", "{\"schema\":\"ninfer-roofline\",\"version\":2}".to_owned(), "missing field"),
        ] {
            let error = Report::read(&Temporary::new(name, &text).0).unwrap_err().to_string();
            assert!(error.contains(words), "{name}: {error}");
        }
        assert!(Report::read(Path::new("/no/such/file")).is_err());
    }

    #[test]
    fn tables_have_a_line_for_each_row() {
        let mut slow = row(Kind::Prefill, 512, 0.2);
        slow.chunk = Some("64".to_owned());
        let kinds = [Kind::Decode, Kind::Round, Kind::Aggregate];
        let mut rows = vec![row(Kind::Prefill, 512, 0.1), slow];
        rows.extend(kinds.map(|k| row(k, 512, if k == Kind::Round { 3e-3 } else { 2e-3 })));
        let text = report(rows).tables();
        for words in ["   512  i8   full   5120  0.100", "0.50  0.500", "2.750", "40       2.0 %", "1.50\n", "321"] {
            assert!(text.contains(words), "{words} in\n{text}");
        }
        assert!(!report(vec![row(Kind::Decode, 512, 1e-3)]).tables().contains("Prefill"));
    }

    #[test]
    fn the_median_is_the_middle_one() {
        assert_eq!([median(&[3.0, 1.0, 2.0]), median(&[1.0, 2.0]), median(&[])], [Some(2.0), Some(2.0), None]);
    }
}
