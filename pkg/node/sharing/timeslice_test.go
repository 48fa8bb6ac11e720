package sharing

import (
	"errors"
	"strings"
	"testing"
)

// The output of nvidia-smi of driver 580 on an H200.
const listed = `+-------------------------------------+
| GPU compute policies:               |
| GPU     Name           Value        |
|=====================================|
|   0   Timeslice       Long          |
+-------------------------------------+
`

func TestParseTimeSlice(t *testing.T) {
	for name, tc := range map[string]struct {
		out, want string
		cannot    bool
	}{
		"long":         {out: listed, want: "Long"},
		"default":      {out: strings.Replace(listed, "Long   ", "Default", 1), want: "Default"},
		"lines end so": {out: strings.ReplaceAll(listed, "\n", "\r\n"), want: "Long"},
		"GPU 13":       {out: strings.Replace(listed, "|   0   ", "|   13  ", 1), want: "Long"},
		"none":         {out: strings.Replace(listed, "Long", "N/A ", 1), cannot: true},
		"nothing":      {},
		"two GPUs":     {out: listed + listed},
		"no policies":  {out: "No devices were found"},
	} {
		got, err := parseTimeSlice(tc.out)
		if got != tc.want || (err == nil) != (tc.want != "") || errors.Is(err, errNoTimeSlices) != tc.cannot {
			t.Errorf("%s: got %q, %v", name, got, err)
		}
	}
}

func TestExplainSMI(t *testing.T) {
	failed := errors.New("exit status 2")
	for out, cannot := range map[string]bool{
		"Failed to set timeslice policy with value Long for GPU 0 : Not Supported":    true,
		"ERROR: Option compute-policy is not recognized. Please run 'nvidia-smi -h'.": true,
		"No devices were found": false,
		"Failed to set timeslice policy with value Unknown for GPU 0 : Invalid Argument": false,
	} {
		err := explainSMI("GPU-1", out, failed)
		if errors.Is(err, errNoTimeSlices) != cannot || errors.Is(err, failed) == cannot || !strings.Contains(err.Error(), out) {
			t.Errorf("%q: got %v", out, err)
		}
	}
	if err := explainSMI("GPU-1", "Not Supported", nil); err != nil {
		t.Errorf("got %v", err)
	}
	if err := explainSMI("GPU-1", strings.Repeat("é\n", 1000), failed); len(err.Error()) > 500 || strings.Contains(err.Error(), "\n") {
		t.Errorf("%d bytes in an error: %v", len(err.Error()), err)
	}
}

func FuzzParseTimeSlice(f *testing.F) {
	f.Add(listed)
	f.Add("|   0   Timeslice       |\n")
	f.Fuzz(func(t *testing.T, out string) {
		got, err := parseTimeSlice(out)
		if _, ok := intervalNumber(got); ok != (err == nil) {
			t.Errorf("%q: got %q, %v", out, got, err)
		}
	})
}
