//! The screen of `idem watch`.

use std::process::ExitCode;
use std::time::Instant;

use idem_runtime::Store;
use idem_runtime::store::Standing;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEventKind, KeyModifiers};
use ratatui::layout::{Constraint, Layout};
use ratatui::style::{Color, Modifier, Style};
use ratatui::widgets::{Cell, Paragraph, Row as Line, Table, TableState, Wrap};
use ratatui::{DefaultTerminal, Frame};

use super::{Look, Row, WatchArguments};
use crate::report::{Stop, hidden};

/// Width of the screen, in characters, from which a row also shows the holder.
const WIDE: u16 = 80;
/// Widths of the columns before the key.
const STATE: u16 = 11;
const SINCE: u16 = 10;

/// State of the screen.
#[derive(Default)]
struct View {
    look: Option<Look>,
    /// Error of the latest reading of the store; `None` if that reading succeeded.
    failure: Option<String>,
    place: TableState,
}

pub(super) async fn run(store: &dyn Store, arguments: &WatchArguments) -> Result<ExitCode, Stop> {
    // If the first reading of the store fails, the command ends with the exit status of the failure. Later failures are
    // shown on the screen.
    let first = Look::at(store, &arguments.look, arguments.counts, None).await?;
    let mut terminal = ratatui::try_init()?;
    let mut view = View { look: Some(first), ..View::default() };
    let done = watch(store, arguments, &mut terminal, &mut view).await;
    ratatui::restore();
    done.map(|()| ExitCode::SUCCESS)
}

async fn watch(
    store: &dyn Store,
    arguments: &WatchArguments,
    terminal: &mut DefaultTerminal,
    view: &mut View,
) -> Result<(), Stop> {
    let mut left = arguments.times;
    loop {
        left = left.map(|left| left.saturating_sub(1));
        let next = Instant::now() + arguments.pause();
        loop {
            terminal.draw(|frame| view.draw(frame))?;
            if left == Some(0) {
                return Ok(());
            }
            let rest = next.saturating_duration_since(Instant::now());
            if rest.is_zero() {
                break;
            }
            // Blocking this thread is fine: no other task runs on it, and leases are renewed on another thread.
            let event =
                tokio::task::block_in_place(|| if event::poll(rest)? { event::read().map(Some) } else { Ok(None) })?;
            if event.is_some_and(|event| view.ends(&event)) {
                return Ok(());
            }
        }
        match Look::at(store, &arguments.look, arguments.counts, view.look.as_ref()).await {
            Ok(look) => *view = View { look: Some(look), failure: None, place: std::mem::take(&mut view.place) },
            Err(Stop::Unreachable(text) | Stop::Refused(text)) => view.failure = Some(hidden(&text)),
            Err(stop) => return Err(stop),
        }
    }
}

impl View {
    /// Handles a key. Returns whether the key ends the program.
    fn ends(&mut self, event: &Event) -> bool {
        let Event::Key(key) = event else { return false };
        match (key.kind, key.code) {
            (KeyEventKind::Release, _) => {}
            (_, KeyCode::Char('q') | KeyCode::Esc) => return true,
            // In raw mode, Ctrl-C is an ordinary key.
            (_, KeyCode::Char('c')) => return key.modifiers.contains(KeyModifiers::CONTROL),
            (_, KeyCode::Down | KeyCode::Char('j')) => self.place.select_next(),
            (_, KeyCode::Up | KeyCode::Char('k')) => self.place.select_previous(),
            (_, KeyCode::PageDown) => self.place.scroll_down_by(10),
            (_, KeyCode::PageUp) => self.place.scroll_up_by(10),
            _ => {}
        }
        false
    }

    fn draw(&mut self, frame: &mut Frame<'_>) {
        let mut head = self.look.as_ref().map(Look::head).unwrap_or_default();
        head.extend(self.failure.as_ref().map(|failure| format!("NOT ANSWERING: {failure}")));
        let width = frame.area().width;
        let lines = head.iter().map(|text| height(text, width)).sum();
        let head = Paragraph::new(head.join("\n")).wrap(Wrap { trim: true });
        // The lines at the top must not be cut off when they wrap, so the table gets only the remaining height.
        let parts = [Constraint::Length(lines), Constraint::Min(1), Constraint::Length(1)];
        let [top, middle, bottom] = Layout::vertical(parts).areas(frame.area());
        let head = if self.failure.is_some() { head.style(Style::new().fg(Color::Red)) } else { head };
        frame.render_widget(head, top);
        let wide = width >= WIDE;
        let records = self.look.iter().flat_map(|look| &look.records);
        let rows = records.map(|(key, found)| {
            let Row { standing, began, lease, holder } = Row::of(found);
            // The most urgent rows are red.
            let color = match found.standing() {
                Standing::Damaged | Standing::Interrupted => Color::Red,
                Standing::Lapsed => Color::Yellow,
                _ => Color::Reset,
            };
            let key =
                if wide { key.to_string() } else { end_of(&key.to_string(), width.saturating_sub(STATE + SINCE + 2)) };
            let mut cells = vec![Cell::new(standing), Cell::new(began), Cell::new(key)];
            if wide {
                let lease = lease.trim_start_matches(", ").to_owned();
                cells.extend([Cell::new(lease), Cell::new(holder.trim().trim_matches(['(', ')']).to_owned())]);
            }
            Line::new(cells).style(Style::new().fg(color))
        });
        let mut widths = vec![Constraint::Length(STATE), Constraint::Length(SINCE), Constraint::Min(10)];
        let mut names = vec!["state", "since", "key"];
        if wide {
            widths.extend([Constraint::Length(20), Constraint::Percentage(25)]);
            names.extend(["lease", "holder"]);
        }
        let table = Table::new(rows, widths)
            .header(Line::new(names).style(Style::new().add_modifier(Modifier::BOLD)))
            .row_highlight_style(Style::new().add_modifier(Modifier::REVERSED));
        frame.render_stateful_widget(table, middle, &mut self.place);
        // The hint is cut off if the screen is too narrow for it.
        frame.render_widget(Paragraph::new("q ends, arrows scroll"), bottom);
    }
}

/// Returns the end of a key that does not fit into the column, because keys differ in their last part.
fn end_of(key: &str, width: u16) -> String {
    let (length, width) = (key.chars().count(), usize::from(width.max(10)));
    match length > width {
        true => std::iter::once('…').chain(key.chars().skip(length + 1 - width)).collect(),
        false => key.to_owned(),
    }
}

/// Returns the maximum number of lines that a wrapped text takes. A word that does not fit leaves space at the end of
/// its line.
fn height(text: &str, width: u16) -> u16 {
    let (length, width) = (text.chars().count(), usize::from(width.max(1)));
    u16::try_from(if length <= width { 1 } else { length.div_ceil(width * 3 / 4 + 1) }).unwrap_or(u16::MAX)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use idem_runtime::record::{Record, State};
    use idem_runtime::store::{Inspection, OwnerToken};
    use idem_runtime::{Key, OnCrash};
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;
    use ratatui::crossterm::event::KeyEvent;

    use super::*;

    fn view() -> View {
        let found = |state: State, lapses_in| {
            let record = Record::new(OwnerToken::from_bytes([1; 16]), 3, state);
            Inspection::new(record, Duration::from_secs(9000), lapses_in).since(None, Some(Duration::from_secs(90)))
        };
        let times = Duration::from_secs(30);
        let pending = || State::Pending { lease: times, ttl: times, on_crash: OnCrash::Retry, begun: false };
        let key = |text: &str| Key::new("shop::payments", text).unwrap();
        let records = vec![
            (key("order:1"), found(State::Interrupted, None)),
            (key("order:2"), found(pending(), Some(Duration::ZERO))),
            (key("order:3"), found(pending(), Some(Duration::from_secs(12)))),
        ];
        let look = Look { store: "redis", took: times, records, more: false, stats: None, ended: None };
        View { look: Some(look), ..View::default() }
    }

    fn drawn(view: &mut View, width: u16, height: u16) -> Vec<String> {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
        terminal.draw(|frame| view.draw(frame)).unwrap();
        let buffer = terminal.backend().buffer();
        let line = |y| (0..width).map(|x| buffer[(x, y)].symbol()).collect::<String>().trim_end().to_owned();
        (0..height).map(line).collect()
    }

    #[test]
    fn a_screen_of_forty_columns_shows_the_ends_of_keys() {
        let lines = drawn(&mut view(), 40, 12);
        assert_eq!(lines[0], "redis, answered in 30.0 s");
        assert_eq!(lines[1], "1 running, 1 lapsed, 1 interrupted");
        assert_eq!(lines[3], "interrupted 1 min 30 s …payments/order:1");
        assert!(lines[4].starts_with("lapsed"), "{lines:#?}");
        assert_eq!(lines[11], "q ends, arrows scroll");
        for (width, height) in [(1, 1), (10, 3), (40, 4), (300, 100)] {
            drawn(&mut view(), width, height);
        }
    }

    #[test]
    fn a_wide_watch_screen_shows_leases() {
        let lines = drawn(&mut view(), 120, 12);
        assert!(lines[5].contains("shop::payments/order:3") && lines[5].contains("lapses in 12.0 s"), "{lines:#?}");
    }

    #[test]
    fn an_unreachable_store_is_shown_above_the_records_that_were_read_last() {
        let mut view = view();
        view.failure = Some("the server can't be reached".to_owned());
        let lines = drawn(&mut view, 40, 12);
        assert!(
            lines[2].starts_with("NOT ANSWERING: the server can't be") && lines[4].starts_with("state"),
            "{lines:#?}"
        );
    }

    #[test]
    fn key_presses_scroll_and_end_the_watch_screen() {
        let mut view = view();
        let mut press = |code, modifiers| view.ends(&Event::Key(KeyEvent::new(code, modifiers)));
        assert!(!press(KeyCode::Down, KeyModifiers::NONE) && !press(KeyCode::Char('c'), KeyModifiers::NONE));
        assert!(press(KeyCode::Char('q'), KeyModifiers::NONE) && press(KeyCode::Char('c'), KeyModifiers::CONTROL));
        assert_eq!(view.place.selected(), Some(0));
    }
}
