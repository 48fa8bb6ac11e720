package nvmlsim_test

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tessera-dra/tessera/pkg/nvmlsim"
)

// The models' tables are those that real machines showed, where any was found:
// every captured row is in the model with these numbers, and no profile of the
// model is missing in the capture.
func TestTablesAreThoseCaptured(t *testing.T) {
	text, err := os.ReadFile("testdata/captured.md")
	check(t, err)
	for section := range strings.SplitSeq(string(text), "\n## ") {
		title, table, _ := strings.Cut(section, "\n")
		id, source, found := strings.Cut(title, ": ")
		if !found {
			continue // the file's introduction
		}
		t.Run(id, func(t *testing.T) {
			model, err := nvmlsim.FindModel(id)
			check(t, err)
			var want []string
			inGiB := false
			for line := range strings.Lines(table) {
				cells := strings.Split(strings.Trim(line, "| \n"), " | ")
				switch {
				case len(cells) != 9:
					continue
				case cells[0] == "profile":
					inGiB = cells[1] == "GiB"
				default:
					want = append(want, strings.Join(cells, " "))
				}
			}
			if len(want) != len(model.MIG.Profiles) {
				t.Errorf("%s shows %d profiles, the model has %d", source, len(want), len(model.MIG.Profiles))
			}
			for _, row := range want {
				if diff := cmp.Diff(row, likeRow(model, row, inGiB)); diff != "" {
					t.Errorf("%s (-captured +model):\n%s", source, diff)
				}
			}
		})
	}
}

// likeRow is the model's row of the same profile, with ? where the capture has it.
func likeRow(m *nvmlsim.Model, row string, inGiB bool) string {
	captured := strings.Fields(row)
	for _, p := range m.MIG.Profiles {
		if p.Name != captured[0] {
			continue
		}
		memory := fmt.Sprint(p.MemorySizeMB)
		if inGiB {
			memory = fmt.Sprintf("%.2f", float64(p.MemorySizeMB)/1024)
		}
		got := []string{p.Name, memory}
		for i, n := range []uint32{p.MultiprocessorCount, p.CopyEngineCount, p.DecoderCount, p.EncoderCount, p.JPEGCount, p.OFACount, p.InstanceCount} {
			cell := fmt.Sprint(n)
			if captured[i+2] == "?" {
				cell = "?"
			}
			got = append(got, cell)
		}
		return strings.Join(got, " ")
	}
	return "no such profile"
}
