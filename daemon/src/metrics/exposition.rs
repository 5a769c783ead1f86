// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The text formats that Prometheus reads: OpenMetrics 1.0, and its older one.

use core::fmt::{Display, Write as _};

/// Which text format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Format {
    /// OpenMetrics 1.0.0.
    OpenMetrics,
    /// Prometheus text format 0.0.4.
    Text,
}

impl Format {
    /// The format for an `Accept` header: the older one for those who want plain text and have not
    /// heard of OpenMetrics. Prometheus lists both.
    pub(super) fn negotiate(accept: Option<&str>) -> Self {
        let accepts = |wanted: &str| {
            let mut ranges = accept.unwrap_or("*/*").split(',');
            ranges.any(|range| {
                let mut parts = range.split(';').map(str::trim);
                let refused =
                    |part: &str| part.strip_prefix("q=").and_then(|q| q.parse().ok()) == Some(0.0);
                parts.next() == Some(wanted) && !parts.any(refused)
            })
        };
        if accepts("text/plain") && !accepts("application/openmetrics-text") {
            Self::Text
        } else {
            Self::OpenMetrics
        }
    }

    /// Its Content-Type.
    pub(super) const fn content_type(self) -> &'static str {
        match self {
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
            Self::Text => "text/plain; version=0.0.4; charset=utf-8",
        }
    }
}

/// Kind of a metric family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Only goes up; samples are named `…_total`.
    Counter,
    /// Goes up and down.
    Gauge,
    /// Always 1, with labels that tell; samples are named `…_info`.
    Info,
}

/// Text in the making.
#[derive(Debug)]
pub(super) struct Exposition {
    format: Format,
    out: String,
}

impl Exposition {
    /// Nothing yet.
    pub(super) fn new(format: Format) -> Self {
        Self {
            format,
            out: String::new(),
        }
    }

    /// Starts a family. `name` goes without the suffix of its kind; `unit` must be its last word.
    pub(super) fn family<'a>(
        &'a mut self,
        name: &'a str,
        kind: Kind,
        unit: Option<&str>,
        help: &str,
    ) -> Family<'a> {
        let suffix = match kind {
            Kind::Counter => "_total",
            Kind::Gauge => "",
            Kind::Info => "_info",
        };
        // The older format knows samples only by their full name, and no info.
        let (described, kind) = match (self.format, kind) {
            (Format::OpenMetrics, Kind::Info) => ("", "info"),
            (Format::OpenMetrics, Kind::Counter) => ("", "counter"),
            (Format::Text, Kind::Counter) => (suffix, "counter"),
            (Format::Text, Kind::Info) => (suffix, "gauge"),
            (_, Kind::Gauge) => (suffix, "gauge"),
        };
        self.line(format_args!("# HELP {name}{described} {help}"));
        self.line(format_args!("# TYPE {name}{described} {kind}"));
        if let (Format::OpenMetrics, Some(unit)) = (self.format, unit) {
            self.line(format_args!("# UNIT {name} {unit}"));
        }
        Family {
            exposition: self,
            name,
            suffix,
        }
    }

    /// The finished text.
    pub(super) fn finish(mut self) -> String {
        if self.format == Format::OpenMetrics {
            self.line(format_args!("# EOF"));
        }
        self.out
    }

    fn line(&mut self, line: core::fmt::Arguments<'_>) {
        // Writing to a string cannot fail.
        let _ = writeln!(self.out, "{line}");
    }
}

/// A family that takes samples.
#[derive(Debug)]
pub(super) struct Family<'a> {
    exposition: &'a mut Exposition,
    name: &'a str,
    suffix: &'static str,
}

impl Family<'_> {
    /// Adds a sample.
    pub(super) fn sample(&mut self, labels: &[(&str, &str)], value: impl Display) -> &mut Self {
        let out = &mut self.exposition.out;
        out.push_str(self.name);
        out.push_str(self.suffix);
        for (index, (name, value)) in labels.iter().enumerate() {
            out.push(if index == 0 { '{' } else { ',' });
            out.push_str(name);
            out.push_str("=\"");
            for c in value.chars() {
                match c {
                    '\\' => out.push_str("\\\\"),
                    '"' => out.push_str("\\\""),
                    '\n' => out.push_str("\\n"),
                    c => out.push(c),
                }
            }
            out.push('"');
        }
        if !labels.is_empty() {
            out.push('}');
        }
        self.exposition_value(value);
        self
    }

    fn exposition_value(&mut self, value: impl Display) {
        // Writing to a string cannot fail.
        let _ = writeln!(self.exposition.out, " {value}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(format: Format) -> String {
        let mut out = Exposition::new(format);
        out.family("x_build", Kind::Info, None, "About.")
            .sample(&[("version", "1")], 1);
        out.family("x_bytes", Kind::Counter, Some("bytes"), "Octets.")
            .sample(&[("a", "q\"b\\c\nd"), ("b", "")], u64::MAX);
        out.family("x_up", Kind::Gauge, None, "Up.").sample(&[], 0);
        out.finish()
    }

    #[test]
    fn openmetrics_has_units_and_an_end() {
        assert_eq!(
            text(Format::OpenMetrics),
            "# HELP x_build About.\n\
             # TYPE x_build info\n\
             x_build_info{version=\"1\"} 1\n\
             # HELP x_bytes Octets.\n\
             # TYPE x_bytes counter\n\
             # UNIT x_bytes bytes\n\
             x_bytes_total{a=\"q\\\"b\\\\c\\nd\",b=\"\"} 18446744073709551615\n\
             # HELP x_up Up.\n\
             # TYPE x_up gauge\n\
             x_up 0\n\
             # EOF\n"
        );
    }

    #[test]
    fn the_older_format_names_families_as_samples() {
        let text = text(Format::Text);
        assert!(text.contains("# TYPE x_bytes_total counter\n"));
        assert!(text.contains("# TYPE x_build_info gauge\n"));
        assert!(!text.contains("# EOF") && !text.contains("# UNIT"));
    }

    #[test]
    fn plain_text_is_for_those_who_know_nothing_better() {
        let prometheus =
            "application/openmetrics-text;version=1.0.0;q=0.6,text/plain;q=0.3,*/*;q=0.1";
        for (accept, format) in [
            (Some(prometheus), Format::OpenMetrics),
            (Some("*/*"), Format::OpenMetrics),
            (None, Format::OpenMetrics),
            (Some("text/plain;version=0.0.4, */*;q=0.1"), Format::Text),
            (
                Some("application/openmetrics-text;q=0, text/plain"),
                Format::Text,
            ),
        ] {
            assert_eq!(Format::negotiate(accept), format, "{accept:?}");
        }
    }
}
