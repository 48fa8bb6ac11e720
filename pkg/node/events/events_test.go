package events

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"testing/synctest"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	corev1client "k8s.io/client-go/kubernetes/typed/core/v1"
	clienttesting "k8s.io/client-go/testing"
)

// TestEventsOfManyGPUs checks that each event of 16 GPUs which fail together is written, with
// its GPU.
func TestEventsOfManyGPUs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var got []string
		client := fake.NewClientset()
		client.PrependReactor("create", "events", func(a clienttesting.Action) (bool, runtime.Object, error) {
			e := a.(clienttesting.CreateAction).GetObject().(*corev1.Event)
			got = append(got, e.Reason+" "+e.Message)
			return true, e, nil
		})
		w := New("test", "node-0")
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- w.Run(ctx, &corev1client.EventSinkImpl{Interface: client.CoreV1().Events("")}) }()
		synctest.Wait()
		var want []string
		for _, reason := range []string{"Lost", "GPUError", "GPUReset", "GPURecovered"} {
			for i := range 16 {
				message := fmt.Sprintf("GPU %d: something happened", i)
				w.OnNode(corev1.EventTypeWarning, reason, message)
				want = append(want, reason+" "+message)
			}
		}
		synctest.Wait()
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
		slices.Sort(got)
		slices.Sort(want)
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("events (-want +got):\n%s", diff)
		}
	})
}
