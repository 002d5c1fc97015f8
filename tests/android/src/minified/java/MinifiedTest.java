package minified;

import static org.junit.Assert.assertEquals;
import static org.junit.Assert.assertTrue;

import android.app.Activity;
import android.content.ComponentCallbacks2;
import android.graphics.Bitmap;
import android.graphics.Canvas;
import android.os.Looper;
import android.view.View;
import android.view.ViewGroup;
import android.widget.Button;
import android.widget.EditText;
import android.widget.TextView;
import java.io.File;
import java.io.FileOutputStream;
import java.io.IOException;
import java.util.function.BooleanSupplier;
import org.junit.Test;
import org.junit.runner.RunWith;
import org.robolectric.Robolectric;
import org.robolectric.RobolectricTestRunner;
import org.robolectric.RuntimeEnvironment;
import org.robolectric.Shadows;
import org.robolectric.annotation.Config;
import org.robolectric.annotation.GraphicsMode;
import org.robolectric.android.controller.ActivityController;

/** The activity after R8: nothing of Kotlin or of edge is named here, since all of it has other names there. */
@RunWith(RobolectricTestRunner.class)
@Config(qualifiers = "w411dp-h891dp-xhdpi")
@GraphicsMode(GraphicsMode.Mode.NATIVE)
public class MinifiedTest {
    @Test
    @SuppressWarnings("deprecation") // older systems still send TRIM_MEMORY_COMPLETE
    public void answersAndSurvivesCancelRotationTrimAndTheProcess() throws Exception {
        assertEquals(36, RuntimeEnvironment.getApplication().getApplicationInfo().targetSdkVersion);
        Class<? extends Activity> kept = Class.forName("com.example.chat.ChatActivity").asSubclass(Activity.class);
        var first = Robolectric.buildActivity(kept).setup();
        assertTrue(run(30, find(shown(first), Button.class)::isEnabled));
        converse(first, "Why is the sky blue?");
        ask(first, "And in the evening?");
        find(shown(first), Button.class).performClick();
        assertTrue(run(30, () -> ready(first)));
        String before = said(first);
        first.recreate(); // rotation
        assertTrue(run(30, () -> said(first).equals(before)));
        RuntimeEnvironment.getApplication().onTrimMemory(ComponentCallbacks2.TRIM_MEMORY_COMPLETE);
        converse(first, "And at night?");
        picture(shown(first));
        String said = said(first);
        first.pause().stop();
        run(3, () -> false);
        first.destroy();
        var next = Robolectric.buildActivity(kept).setup();
        assertTrue(run(30, () -> said(next).equals(said)));
    }

    private static View shown(ActivityController<? extends Activity> of) {
        return of.get().getWindow().getDecorView();
    }

    private static void ask(ActivityController<? extends Activity> in, String question) {
        find(shown(in), EditText.class).setText(question);
        find(shown(in), Button.class).performClick();
    }

    /** Until an answer has text: this model draws the end by chance. */
    private static void converse(ActivityController<? extends Activity> in, String question) throws InterruptedException {
        int before, tries = 0;
        do {
            before = said(in).length() + question.length();
            ask(in, question);
            assertTrue(run(60, () -> ready(in)));
        } while (said(in).length() <= before + 10 && ++tries < 5);
        assertTrue(said(in).length() > before + 10);
    }

    private static boolean ready(ActivityController<? extends Activity> in) {
        return find(shown(in), Button.class).getText().toString().equals("Send");
    }

    /** The text that is neither a button nor a field. */
    private static String said(ActivityController<? extends Activity> in) {
        return find(shown(in), TextView.class).getText().toString();
    }

    private static void picture(View view) throws IOException {
        Bitmap bitmap = Bitmap.createBitmap(view.getWidth(), view.getHeight(), Bitmap.Config.ARGB_8888);
        view.draw(new Canvas(bitmap));
        try (var file = new FileOutputStream(new File(System.getProperty("pictures"), "minified.png"))) {
            bitmap.compress(Bitmap.CompressFormat.PNG, 100, file);
        }
    }

    private static boolean run(double seconds, BooleanSupplier done) throws InterruptedException {
        for (long end = System.nanoTime() + (long) (seconds * 1e9); System.nanoTime() < end; Thread.sleep(5)) {
            Shadows.shadowOf(Looper.getMainLooper()).idle();
            if (done.getAsBoolean()) return true;
        }
        return false;
    }

    /** The first view that is of this very class. */
    private static <T extends View> T find(View view, Class<T> kind) {
        if (view.getClass() == kind) return kind.cast(view);
        if (view instanceof ViewGroup group)
            for (int i = 0; i < group.getChildCount(); i++) {
                T found = find(group.getChildAt(i), kind);
                if (found != null) return found;
            }
        return null;
    }
}
