// A library module: copy this folder into an Android project, and add include(":edge") to its settings.gradle.kts and
// implementation(project(":edge")) to the app's dependencies.
import org.jetbrains.kotlin.gradle.dsl.JvmTarget

plugins {
    id("com.android.library")
    id("org.jetbrains.kotlin.android") // leave it out from version 9 of the Android plugin on
}

android {
    namespace = "edge.runtime"
    compileSdk = 35
    defaultConfig {
        minSdk = 26
        consumerProguardFiles("consumer-rules.pro")
    }
    compileOptions {
        sourceCompatibility = JavaVersion.VERSION_17
        targetCompatibility = JavaVersion.VERSION_17
    }
}

kotlin {
    compilerOptions { // no jvmToolchain, which would want a JDK 17 beside Android Studio's own
        jvmTarget.set(JvmTarget.JVM_17)
    }
}

dependencies {
    compileOnly("org.jetbrains.kotlinx:kotlinx-serialization-json:1.8.1") // of Schemas.kt, for apps that have it
    api("org.jetbrains.kotlinx:kotlinx-coroutines-android:1.8.1")
}
