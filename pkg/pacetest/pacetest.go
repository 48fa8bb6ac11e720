// Package pacetest bounds how often a worker that fails all the time tries again, and how much
// it logs.
package pacetest

import (
	"testing"

	"k8s.io/klog/v2"
	"k8s.io/klog/v2/ktesting"
)

// Bound is the most of attempts and of log lines in a minute.
type Bound struct{ Attempts, Lines int }

// Logger returns a logger at verbosity 0, and a function that counts the lines logged so far.
func Logger(t *testing.T) (logger klog.Logger, lines func() int) {
	t.Helper()
	logger = ktesting.NewLogger(t, ktesting.NewConfig(ktesting.BufferLogs(true), ktesting.Verbosity(0)))
	return logger, func() int { return len(logger.GetSink().(ktesting.Underlier).GetBuffer().Data()) }
}

// Minutes calls minute, which lets a minute pass, once for each bound, and compares what
// attempts and lines have counted meanwhile. There must be attempts in each minute, and a
// log line in the first if it may have any. Both counts begin at 0.
func Minutes(t *testing.T, attempts, lines func() int, minute func(), bounds ...Bound) {
	t.Helper()
	var before, logged int
	for i, most := range bounds {
		minute()
		tried, said := attempts()-before, lines()-logged
		if tried == 0 || tried > most.Attempts || said > most.Lines || i == 0 && said == 0 && most.Lines > 0 {
			t.Errorf("minute %d: %d attempts and %d log lines, want at most %d and %d", i, tried, said, most.Attempts, most.Lines)
		}
		before, logged = before+tried, logged+said
	}
}
