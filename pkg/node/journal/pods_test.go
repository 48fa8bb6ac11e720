package journal_test

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tessera-dra/tessera/pkg/health"
	"github.com/tessera-dra/tessera/pkg/node/holding"
)

// withPods has the pods that the claim was reserved for.
func withPods(uid string) holding.Record {
	r := everything(uid)
	r.Pods = []holding.Pod{{UID: "3c0f6d1e-8a10-4135-bada-13f71feaef21", Name: "worker-0"}, {UID: "4d1f6d1e-8a10-4135-bada-13f71feaef21", Name: "worker-1"}}
	return r
}

// givenUp returns a claim that was unprepared while its GPUs were lost and its containers ran.
func givenUp(uid string) holding.Record {
	r := everything(uid)
	r.GivenUp = &health.Load{Boot: r.BootID, Driver: "48213"}
	return r
}

// TestOldFormatOfPods keeps records with pods readable, and written as they are.
func TestOldFormatOfPods(t *testing.T) { checkFormat(t, "v1-pods", withPods(formatUID)) }

// TestOldFormatOfGivenUp keeps records of claims that were given up readable.
func TestOldFormatOfGivenUp(t *testing.T) { checkFormat(t, "v1-given-up", givenUp(formatUID)) }

// formatUID is of the claims in testdata.
const formatUID = "5e8f3b5c-5f0e-4a55-9a55-0d3f7a1b2c3d"

// checkFormat checks that a file in testdata is read as the record, and that the record is
// written as that file.
func checkFormat(t *testing.T, golden string, record holding.Record) {
	t.Helper()
	golden = filepath.Join("testdata", golden)
	dir := t.TempDir()
	if err := os.CopyFS(dir, os.DirFS(golden)); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]holding.Record{record}, open(t, dir).Claims().Records()); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
	again := t.TempDir()
	put(t, open(t, again), record)
	var files [2]string
	for i, dir := range []string{golden, again} {
		data, err := os.ReadFile(filepath.Join(dir, formatUID+".json"))
		if err != nil {
			t.Fatal(err)
		}
		files[i] = string(data)
	}
	if diff := cmp.Diff(files[0], files[1]); diff != "" {
		t.Errorf("what is written (-golden +now):\n%s", diff)
	}
}
